"""How Sphinx builds these pages: ``python -m sphinx -W -b html docs docs/_build``. Warnings are errors."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

sys.path.insert(0, str(Path(__file__).parents[1]))

import multienv

project = "multienv"
author = "The multienv authors"
version = release = multienv.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"multienv {version}"
html_copy_source = False

myst_heading_anchors = 4

# What an adapter adapts and is not installed: the docs build without it.
_ADAPTED = ["stable_baselines3", "torch", "ray", "tianshou", "torchrl", "tensordict", "pettingzoo", "prometheus_client"]
autodoc_mock_imports = [name for name in _ADAPTED if find_spec(name) is None]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature stays short; docstrings say types where they matter
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def setup(app: Any) -> None:
    """Show diagrams for GitHub as text."""
    app.add_lexer("mermaid", TextLexer)
