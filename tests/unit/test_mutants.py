"""Each mutant of ``tests/mutants`` still fits the package; running them is another matter."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import multienv
from mutants.__main__ import applied
from mutants.mutants import MUTANTS, Mutant

PACKAGE = Path(multienv.__file__).parent


@cache
def dump_of(text: str) -> str:
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_replaces_one_place_of_the_package_and_leaves_a_program(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    broken = applied(mutant, text)
    if mutant.file.endswith(".py"):  # C is compiled when the mutant is run
        assert ast.dump(ast.parse(broken)) != dump_of(text)
    assert broken != text


def test_a_mutant_whose_text_is_not_there_or_there_twice_is_refused() -> None:
    mutant = Mutant("It is broken.", 1, "file.py", "old", "new")
    for text in ("", "old old"):
        with pytest.raises(ValueError, match=r"file\.py.*It is broken"):
            applied(mutant, text)


def test_each_invariant_has_mutants_and_each_mutant_a_name_of_its_own() -> None:
    assert {mutant.invariant for mutant in MUTANTS} == set(range(1, 11))
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
    assert all(mutant.name.endswith(".") and "|" not in mutant.name for mutant in MUTANTS)
