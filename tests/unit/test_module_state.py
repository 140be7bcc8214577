"""What a trainer has set in modules is found, if it is plain data of a bearable size."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from multienv._engine.building import module_state
from multienv._engine.building.module_state import lines_to_import, module_values
from multienv._engine.worker.module_values import set_module_values

SOURCE = """
import os
N, TEXT, NOTHING, SAME = 1, "a", None, 0.5
LIST = [1, [2]]
KIND: dict = {}
PID = os.getpid()
class Env:
    gravity = -9.81
    class Options:
        fast = False
"""
Path_ = tuple[str, ...]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user's."""
    (tmp_path / "users_own_settings.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import users_own_settings  # type: ignore[import-not-found]

    yield users_own_settings
    del sys.modules["users_own_settings"]


def sent(name: str) -> dict[Path_, Any]:
    found: dict[Path_, Any] = pickle.loads(module_values())[0].get(name, {})
    return found


def test_what_differs_from_the_source_is_sent(module: Any) -> None:
    assert sent("users_own_settings") == {}
    module.N, module.TEXT, module.PID = 2, None, 0
    module.LIST[1].append(3)
    module.KIND["k"] = {"a": (1.0, b"b", np.float32(2)), "b": np.arange(3)}
    module.Env.gravity = module.Env.Options.fast = 1j
    found = sent("users_own_settings")
    assert found.pop(("KIND",))["k"]["b"].tolist() == [0, 1, 2]
    assert found == {
        ("N",): 2, ("TEXT",): None, ("LIST",): [1, [2, 3]], ("Env", "gravity"): 1j, ("Env", "Options", "fast"): 1j,
    }  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [object(), [lambda: 0], {"a": {1, Path}}, np.array([None]), "x" * 2**21, [0] * 2**15, [[0] * 2**13] * 3],
    ids=["object", "function", "class", "objects in an array", "long text", "long list", "long lists"],
)
def test_what_is_no_plain_data_or_large_stays(module: Any, value: Any) -> None:
    module.N = value
    assert sent("users_own_settings") == {}


def test_types_of_python_are_sent(module: Any) -> None:
    module.NOTHING = bool
    assert sent("users_own_settings") == {("NOTHING",): bool}


def test_a_module_that_is_loaded_at_a_look_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_of_a_test.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("lazy_of_a_test")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_of_a_test", module)
    spec.loader.exec_module(module)
    assert sent("lazy_of_a_test") == {}
    assert not (tmp_path / "loaded").exists()


def test_a_list_that_holds_itself_stays(module: Any) -> None:
    module.LIST.append(module.LIST)
    assert sent("users_own_settings") == {}


def test_a_module_that_is_another_one_in_the_worker_is_left_alone(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.Env.gravity, module.N = -1.6, 2
    values = module_values()
    del module.Env
    module.N = 1
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    set_module_values(values)
    assert module.N == 2


def test_lines_at_the_top_of_a_script_are_told_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """import ctypes, os, os.path as path
import torch
LIB = ctypes.CDLL("sim.so")
LIB.step.restype = ctypes.c_double
LIB.init(9.81)                    # 5
if path.exists("/"):
    code = LIB.start(1)           # 7
path.sep_of_a_test = object()     # of the trainer
torch.backends.cudnn.deterministic = object
def main():
    LIB.end()
    import users_own_settings as own
    own.N = object()
if __name__ == "__main__":
    LIB.end()
"""
    )
    monkeypatch.setattr(module_state, "main_file", lambda: str(script))
    assert lines_to_import() == (5, 7)
    monkeypatch.setattr(module_state, "main_file", lambda: str(tmp_path / "absent.py"))
    assert lines_to_import() == ()
