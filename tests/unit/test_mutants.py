"""Each mutant of ``tests/mutants`` still fits the package; running them is another matter."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import multienv
from mutants.__main__ import applied, culprit
from mutants.mutants import MUTANTS, Mutant

PACKAGE = Path(multienv.__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_replaces_one_place_of_the_package_and_leaves_python(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    broken = applied(mutant, text)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(text))


def test_a_mutant_whose_text_is_not_there_or_there_twice_is_refused() -> None:
    mutant = Mutant("It is broken.", 1, "file.py", "old", "new")
    for text in ("", "old old"):
        with pytest.raises(ValueError, match=r"file\.py.*It is broken"):
            applied(mutant, text)


def test_each_invariant_has_mutants_and_each_mutant_a_name_of_its_own() -> None:
    assert {mutant.invariant for mutant in MUTANTS} == set(range(1, 11))
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
    assert all(mutant.name.endswith(".") and "|" not in mutant.name for mutant in MUTANTS)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("FAILED tests/a.py::test_b[two words] - assert 1 == 2\n", ("tests/a.py::test_b[two words]", "failed")),
        ("ERROR tests/a.py::test_b - kit.leaks.LeakError: left\n", ("tests/a.py::test_b", "failed")),
        (
            "FAILED tests/a.py::test_b - Failed: Timeout (>60.0s) from pytest-timeout.\n",
            ("tests/a.py::test_b", "hangs"),
        ),
        (
            "tests/a.py::test_b[x y] PASSED [ 1%]\ntests/a.py::test_c[x y] \nTimeout!\n",
            ("tests/a.py::test_c[x y]", "hangs"),
        ),
    ],
)
def test_the_test_that_caught_a_mutant_is_read_out_of_the_output(output: str, expected: tuple[str, str]) -> None:
    assert culprit(output) == expected
