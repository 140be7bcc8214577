"""Builds the native extension where there is a compiler; all else is in setup.cfg."""

import os

from setuptools import Extension, setup

required = os.environ.get("MULTIENV_REQUIRE_EXTENSION", "0") not in ("", "0")
setup(ext_modules=[Extension("multienv._native", ["multienv/_native.c"], optional=not required)])
