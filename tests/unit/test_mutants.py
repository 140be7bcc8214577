"""Each mutant of ``tests/mutants`` still fits the package; running them is another matter."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

import multienv
from mutants.changes import applied, file_of
from mutants.mutants import MUTANTS, Mutant

PACKAGE = Path(multienv.__file__).parent


@cache
def dump_of(text: str) -> str:
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_of_the_package_and_leaves_a_program(mutant: Mutant) -> None:
    file = file_of(mutant.place, PACKAGE)
    text = file.read_text()
    broken = applied(mutant, text)
    if file.suffix == ".py":  # C is compiled when the mutant is run
        assert ast.dump(ast.parse(broken)) != dump_of(text)
    assert broken != text


def test_each_invariant_has_mutants_and_each_mutant_a_name_of_its_own() -> None:
    assert {mutant.invariant for mutant in MUTANTS} == set(range(1, 11))
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
    assert all(mutant.name.endswith(".") and "|" not in mutant.name for mutant in MUTANTS)


# --- how a mutant's place is found -----------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    files = ("__init__.py", "room/__init__.py", "room/journal.py", "room/relay.py", "other/relay.py", "room/fast.c")
    for name in files:
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "package"


@pytest.mark.parametrize(
    ("place", "file"),
    [
        ("journal:plans", "room/journal.py"),
        ("package.room.journal:plans", "room/journal.py"),
        ("other.relay:send", "other/relay.py"),
        ("room:LIMIT", "room/__init__.py"),
        ("fast.c", "room/fast.c"),
    ],
)
def test_a_module_is_found_by_its_last_names(package: Path, place: str, file: str) -> None:
    assert file_of(place, package) == package / file


def test_a_module_that_was_moved_to_another_folder_is_found(package: Path) -> None:
    (package / "room/journal.py").rename(package / "other/journal.py")
    assert file_of("journal:plans", package) == package / "other/journal.py"


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("relay:send", r"relay:send: names 2 files, not one: other/relay.py, room/relay.py"),
        ("nal:plans", r"nal:plans: names 0 files, not one: none"),
        ("slow.c", r"names 0 files"),
    ],
)
def test_a_module_that_is_missing_or_ambiguous_is_refused(package: Path, place: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        file_of(place, package)


# --- how it is changed ------------------------------------------------------------------------------

MODULE = dedent(
    '''
    LIMITS = {"é": 1, "steps": 2}

    if True:
        def ask(self): return 1

    class Journal:
        """Keeps `number > 0`."""

        size: int = 8

        @property
        def last(self):
            return self._last

        @last.setter
        def last(self, number):
            self._last = number

        def take(self, number, *, seed=None):
            # number > 0 and self.known
            if (number > 0  # it began
                    and self.known):
                self.put(number,
                         seed=seed)  # kept
                self.count += 1
            elif number == 0:
                return None
            text = f"{number > 0}"
            def inner():
                return number > 0
            return (x for x in self.all if x)
    '''
)


def changed(definition: str, old: str, new: str) -> list[str]:
    """Return the new text of the lines that a change changes; there are as many lines as before."""
    broken = applied(Mutant("It is broken.", 1, f"journal:{definition}", old, new), MODULE)
    lines = zip(MODULE.splitlines(), broken.splitlines(), strict=True)
    return [after.strip() for before, after in lines if before != after]


@pytest.mark.parametrize(
    ("definition", "old", "new", "lines"),
    [
        # An expression, written in another way than in the package, where another function has it too.
        ("Journal.take.inner", "number  >0", "number", ["return (number)"]),
        ("Journal.take", "number>0 and self.known", "False", ["if ((False", ")):"]),
        ("Journal.take", "(x for x in self.all if x)", "()", ["return (())"]),
        ("LIMITS", "'steps'", "'calls'", ["LIMITS = {\"é\": 1, ('calls'): 2}"]),
        ("Journal.size", "8", "9", ["size: int = (9)"]),
        ("ask", "return 1", "return 2", ["def ask(self): return 2"]),
        ("Journal.last", "self._last = number", "", ["pass"]),
        # An argument that is passed by its name.
        ("Journal.take", "seed = seed", "seed = 0 or 1", ["seed=(0 or 1))  # kept"]),
        # Statements: what follows keeps its lines.
        ("Journal.take", "self.count += 1", "", ["pass"]),
        ("Journal.take", "self.put(number, seed=seed)\nself.count += 1", "", ["pass", "", ""]),
        ("Journal.take", "self.put(number, seed=seed)", "", ["pass", "# kept"]),
        (
            "Journal.take",
            "\n    self.put(number, seed=seed)\n    ",
            "\n    x = 1\n    del x\n",
            ["x = 1", "del x  # kept"],
        ),
    ],
)
def test_a_change_replaces_its_place_and_moves_no_line(definition: str, old: str, new: str, lines: list[str]) -> None:
    assert changed(definition, old, new) == lines


def test_the_condition_of_an_elif_can_be_changed_and_the_elif_itself_is_no_statement() -> None:
    assert changed("Journal.take", "number == 0", "True") == ["elif (True):"]
    with pytest.raises(ValueError, match="stands there 0 times"):
        changed("Journal.take", "if number == 0: return None", "")


def test_a_change_binds_as_it_is_written_whatever_stands_around_it() -> None:
    broken = applied(Mutant("It is broken.", 1, "areas:area", "width", "width + 1"), "def area(): return 2 * width")
    assert broken == "def area(): return 2 * (width + 1)"


@pytest.mark.parametrize(
    ("definition", "old", "new", "match"),
    [
        ("Journal.take", "number >= 0", "False", r"journal:Journal.take: stands there 0 times: 'number >= 0' \(It is"),
        ("Journal.take", "number > 0", "False", "stands there 2 times"),  # in its condition, and in inner()
        ("Journal.take", "self.count", "self.size, self.count", "It is broken"),
        ("Journal.give", "number > 0", "False", "journal:Journal.give: is not defined"),
        ("take", "number > 0", "False", "is not defined"),
        ("Journal.take", "number >", "False", "invalid syntax.*It is broken"),
    ],
)
def test_a_change_that_fits_nowhere_or_twice_or_leaves_no_program_is_refused(
    definition: str, old: str, new: str, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        changed(definition, old, new)


def test_text_of_c_that_is_not_there_or_there_twice_is_refused() -> None:
    mutant = Mutant("It is broken.", 1, "file.c", "old", "new")
    assert applied(mutant, "an old one") == "an new one"
    for text in ("", "old old"):
        with pytest.raises(ValueError, match=r"file\.c.*It is broken"):
            applied(mutant, text)
