"""Which files a process has imported, and whether two processes have imported the same."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multienv._engine.worker import imports
from multienv._engine.worker.imports import changed_file, noted_files


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "_noted", {})
    path = tmp_path / "noted_module.py"
    path.write_text("VALUE = 1\n")
    yield path
    sys.modules.pop("noted_module", None)


def of(host: str, **files: tuple[int, int]) -> bytes:
    return pickle.dumps((host, files))


def files_of(found: bytes) -> dict[str, tuple[int, int]]:
    files: dict[str, tuple[int, int]] = pickle.loads(found)[1]
    return files


def test_imported_modules_are_noted_with_packages_but_without_the_standard_library(module: Path) -> None:
    began = time.time_ns()
    importlib.import_module("noted_module")
    files = files_of(noted_files(began))
    status = module.stat()
    assert files[str(module)] == (status.st_mtime_ns, status.st_size)
    assert np.__file__ in files
    assert imports.__file__ in files
    assert json.__file__ not in files


def test_file_is_noted_once_as_it_was_when_its_module_was_imported(module: Path) -> None:
    importlib.import_module("noted_module")
    before = noted_files(time.time_ns())
    module.write_text("VALUE = 200\n")
    assert noted_files(time.time_ns()) == before, "a fork inherits the module and what was noted of it"


def test_file_that_is_written_while_it_may_be_imported_equals_no_other(module: Path) -> None:
    began = time.time_ns()
    os.utime(module, ns=(began + 10**9, began + 10**9))
    importlib.import_module("noted_module")
    found = noted_files(began)
    later = pickle.dumps((pickle.loads(found)[0], {str(module): (began + 10**9, module.stat().st_size)}))
    assert changed_file(found, later) == str(module)


def test_module_without_a_file_and_one_that_was_deleted_do_no_harm(module: Path) -> None:
    importlib.import_module("noted_module")
    module.unlink()
    assert files_of(noted_files(time.time_ns()))[str(module)] == (0, 0)


def test_files_that_both_have_are_compared_by_time_and_size_and_on_another_host_by_size() -> None:
    before = of("here", one=(1, 10), two=(2, 20))
    assert changed_file(before, of("here", one=(1, 10), two=(2, 20), three=(3, 30))) == ""
    assert changed_file(before, of("here", two=(2, 20))) == ""
    assert changed_file(before, of("here", one=(1, 10), two=(3, 20))) == "two"
    assert changed_file(before, of("here", one=(1, 11))) == "one"
    assert changed_file(before, of("there", one=(9, 10), two=(9, 20))) == ""
    assert changed_file(before, of("there", one=(1, 10), two=(2, 21))) == "two"
    assert changed_file(b"", before) == changed_file(before, b"") == ""


class SaysThatItIsAModule:
    """As the libraries of cffi are, which lie in sys.modules: its class is no module, and it has no attributes."""

    __slots__ = ()
    __class__ = type(sys)  # type: ignore[assignment]


def test_an_object_that_only_says_that_it_is_a_module_is_passed_over(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "noted_module", SaysThatItIsAModule())
    assert str(module) not in files_of(noted_files(0))
    assert not imports.is_installed(SaysThatItIsAModule())
