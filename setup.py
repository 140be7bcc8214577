"""Builds the native extension where there is a compiler; all else is in setup.cfg."""

import os
import platform

from setuptools import Extension, setup

# multienv/_engine/native.py says why other processors need the extension.
required = os.environ.get("MULTIENV_REQUIRE_EXTENSION", "0") not in ("", "0") or platform.machine() not in (
    "x86_64",
    "AMD64",
)
setup(ext_modules=[Extension("multienv._engine._native", ["multienv/_engine/_native.c"], optional=not required)])
