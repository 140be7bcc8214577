"""The pages that quote code quote it as it is: the code itself is run by the tests beside this one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.py"))


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_stands_in_the_page_word_for_word(path):
    assert path.read_text() in blocks("recipes.md"), f"docs/recipes.md: paste {path.name} again"


def test_the_page_of_recipes_has_no_other_code():
    assert len(blocks("recipes.md")) == len(RECIPES) > 0


def test_the_page_for_learners_quotes_ppo_torch():
    source = (ROOT / "examples" / "ppo_torch.py").read_text()
    quoted = blocks("learners.md")
    assert len(quoted) > 2
    assert [block for block in quoted if block not in source] == []
