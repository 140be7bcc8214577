"""What the documentation must not forget; its Python is run by ``tests/cli/test_examples.py``."""

from __future__ import annotations

import configparser
import pkgutil
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import pytest

import multienv
import multienv.adapters
import multienv.errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def test_the_reference_has_every_public_name():
    reference = (DOCS / "api.md").read_text()
    forgotten = [name for name in multienv.__all__ if name not in multienv.errors.__all__]
    forgotten = [name for name in forgotten if f":: multienv.{name}\n" not in reference]
    assert not forgotten
    adapters = [f"multienv.adapters.{module.name}" for module in pkgutil.iter_modules(multienv.adapters.__path__)]
    for module in ("multienv.errors", "multienv.testing", *adapters):
        assert f".. automodule:: {module}\n" in reference, f"add it to docs/api.md: {module}"


def test_every_signature_of_the_reference_can_be_read():
    """Sphinx cannot parse a default ``<factory>`` of a dataclass, and then shows the types as ``~typing.Any``."""
    records = [value for name, value in vars(multienv).items() if name in multienv.__all__ and is_dataclass(value)]
    assert multienv.Fragment in records
    assert [one for record in records for one in fields(record) if one.default_factory is not MISSING] == []


def test_what_is_to_be_installed_is_an_extra_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["name"] == "multienv-rl"
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *(ROOT / "multienv").rglob("*.py")]
    named = {
        found for file in files for found in re.findall(r'pip install "(multienv[\w-]*)\[(\w+)\]', file.read_text())
    }
    extras = {("multienv-rl", extra) for extra in setup["options.extras_require"]}
    assert {("multienv-rl", "cli"), ("multienv-rl", "sb3")} <= named <= {*extras, ("multienv-rl", "EXTRA")}


def test_the_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_index_lists_every_page():
    listed = re.findall(r"^\w+$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert {page.stem for page in PAGES} - {"index"} <= set(listed)


def test_pages_have_no_blocks_that_the_code_host_shows_as_source():
    assert [page.name for page in PAGES if ":::" in page.read_text()] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "tutorial").glob("*.py")), ids=lambda path: path.name)
def test_a_file_of_the_tutorial_stands_in_its_page(path):
    assert f"```python\n{path.read_text()}```" in (DOCS / "tutorial.md").read_text(), f"paste {path.name} again"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_a_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            linked = (page.parent / file) if file else page
            assert linked.exists(), target
            if anchor:
                titles = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target
