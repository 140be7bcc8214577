"""How Sphinx builds these pages: ``python -m sphinx -W -b html docs docs/_build``. Warnings are errors."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import inspect

import multienv
import multienv.testing

project = "multienv"
author = "The multienv authors"
version = release = multienv.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"multienv {version}"
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0969da", "color-brand-content": "#0969da"},
    "dark_css_variables": {"color-brand-primary": "#58a6ff", "color-brand-content": "#58a6ff"},
}

myst_heading_anchors = 4

copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "

# What an adapter adapts and is not installed: the docs build without it.
_ADAPTED = ["stable_baselines3", "torch", "ray", "tianshou", "torchrl", "tensordict", "pettingzoo", "prometheus_client"]
autodoc_mock_imports = [name for name in _ADAPTED if find_spec(name) is None]
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 110  # a longer signature has a line for each argument
python_display_short_literal_types = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Public classes say that they are of `multienv`. autodoc reads the source of their module for the order of members.
for _public in (multienv, multienv.testing):
    for _thing in (getattr(_public, name) for name in _public.__all__):
        if inspect.isclass(_thing) and _thing.__module__ == _public.__name__:
            functions = (one for one in vars(_thing).values() if inspect.isfunction(one))
            _thing.__module__ = next((one.__module__ for one in functions), _thing.__module__)
