"""The native extension: its control words do what a memoryview does, and who asks for it or not gets it or not."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_strategies import fingerprint

import multienv._engine.worker.stepper
from multienv import ResetNeededError, SerialEnv, SerialVectorEnv
from multienv._engine.native import native
from multienv._engine.recovery.hot_path import StepBuffers
from multienv._engine.wire.codecs import RowsReply
from multienv.envs.subprocess_env import supervisor_of

needs_extension = pytest.mark.skipif(native is None, reason="there is no native extension, or it is not wanted")
ROOT = Path(multienv.__file__).parents[1]


def words_of(kind: str, memory: Any) -> Any:
    return memory.cast("q") if kind == "python" else native.Words(memory)


@pytest.fixture(params=["python", pytest.param("native", marks=needs_extension)])
def words(request: pytest.FixtureRequest) -> Any:
    return words_of(request.param, memoryview(bytearray(64)))


def test_a_word_is_an_integer_of_64_bits(words: Any) -> None:
    for value in (0, 1, -1, 2**63 - 1, -(2**63), True):
        words[3] = value
        assert words[3] == value
        assert type(words[3]) is int
    assert [words[place] for place in (2, 4)] == [0, 0]
    assert bytes(words)[24:32] == (1).to_bytes(8, sys.byteorder)


@pytest.mark.parametrize(("place", "value"), [(8, 0), (0, 2**63), (0, 0.5), (0, None), ("0", 0)])
def test_what_is_no_word_is_refused(words: Any, place: Any, value: Any) -> None:
    with pytest.raises((IndexError, ValueError, TypeError, OverflowError)):
        words[place] = value
    assert bytes(words) == bytes(64)


@pytest.mark.parametrize("kind", ["python", pytest.param("native", marks=needs_extension)])
def test_words_that_are_looked_on_cannot_be_changed(kind: str) -> None:
    words = words_of(kind, memoryview(bytes(64)))
    assert words[7] == 0
    with pytest.raises(TypeError):
        words[7] = 1


@needs_extension
def test_words_keep_their_memory() -> None:
    memory = bytearray(64)
    words = native.Words(memoryview(memory))
    with pytest.raises(BufferError):
        memory.clear()
    del words
    memory.clear()


# --- what a worker writes -----------------------------------------------------------------------------

WHOLE = np.arange(4, dtype=np.float32)
OBSERVATIONS = [
    WHOLE,
    WHOLE + 1,
    WHOLE.astype(np.float64),
    [1.0, 2.0, 3.0, 4.0],
    np.arange(8, dtype=np.float32)[::2],
    None,
]
REWARDS = [0.5, -0.0, np.float64(2.5), np.float32(0.1), 3, True, "much", None]
FLAGS = [False] * 6 + [True, np.False_, np.True_, 0, 1, None, np.zeros(2)]
INFOS: list[Any] = [
    {},
    {"a": 1.5},
    {"a": 2.5, "b": 7},
    {"b": 7, "a": 2.5},
    {"a": np.float64(0.25), "b": -1},
    {"c": np.float32(0.1), "d": np.int32(-5), "e": np.uint8(200), "f": np.int64(-(2**62)), "g": True},
    {"a": 1.5, "b": 2**70},
    {"a": "text"},
    None,
    [],
    "no dict",
]
RESULTS = st.tuples(
    *[st.sampled_from(values) for values in (OBSERVATIONS, REWARDS, FLAGS, FLAGS, INFOS)]
) | st.sampled_from([None, (1, 2), KeyError("raised")])


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Returns what it is told, or raises it."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, results: list[Any]) -> None:
        self.results = iter(results)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return WHOLE + 7, {}

    def step(self, action: Any) -> Any:
        result = next(self.results)
        if isinstance(result, Exception):
            raise result
        return result


def banks_after(script: list[list[Any]], face: str, mode: str) -> list[Any]:
    """Return what lies in bank and payload after each step; a slot's results are a column of the script."""
    fns = [partial(ScriptedEnv, [row[slot] for row in script]) for slot in range(len(script[0]))]
    envs: Any = SerialVectorEnv(fns, autoreset_mode=mode) if face == "rows" else SerialEnv(fns[0])
    worker = envs._workers[0] if face == "rows" else supervisor_of(envs)
    seen: list[Any] = []
    with envs:
        envs.reset(seed=0)
        for _ in script:
            try:
                envs.step(np.ones(len(fns), np.int64) if face == "rows" else 1)
            except ResetNeededError:
                envs.reset(seed=1)
            except Exception as error:  # also what gymnasium does not merge
                seen.append(type(error).__name__)
            else:
                assert_reference_reads_the_same(worker)
            segment, number = worker.segment, worker.position.number
            seen.append((number, bytes(segment.banks[number & 1].view), segment.read_reply_payload(number)))
    return seen


def assert_reference_reads_the_same(worker: Any) -> None:
    """Hold the last answer against what the reference reads in its bank, if that is plain."""
    reference, number, answer = StepBuffers(worker.channel, worker.codec), worker.position.number, worker.last_answer
    expected = reference.read(number) if reference.heads[number & 1][0] in reference.meanings else None
    if isinstance(answer, RowsReply) and expected is not None:
        answer, expected = ([*one.leaves, one.rewards, list(one.extras.infos) if one.extras else []]
                            for one in (answer, expected))  # fmt: skip
    assert expected is None or fingerprint(answer) == fingerprint(expected)


@needs_extension
@pytest.mark.parametrize(("face", "mode"), [("rows", "NEXT_STEP"), ("rows", "SAME_STEP"), ("exact", "")])
@settings(max_examples=30)
@given(st.lists(st.lists(RESULTS, min_size=3, max_size=3), min_size=4, max_size=8))
def test_a_worker_writes_what_the_reference_writes(face: str, mode: str, script: list[list[Any]]) -> None:
    ours = banks_after(script, face, mode)
    with mock.patch.object(multienv._engine.worker.stepper, "native", None):
        reference = banks_after(script, face, mode)
    assert without_tracebacks(ours) == without_tracebacks(reference)


class Interrupting:
    """Raises KeyboardInterrupt where it is looked at, once."""

    looks = 0

    def __bool__(self) -> bool:
        self.looks += 1
        if self.looks == 1:
            raise KeyboardInterrupt
        return False

    __float__ = __bool__


@pytest.mark.parametrize("place", [1, 2, 3])
def test_ctrl_c_while_a_result_is_looked_at_is_not_lost(place: int) -> None:
    result: list[Any] = [WHOLE, 1.0, False, False, {}]
    result[place] = Interrupting()
    with SerialVectorEnv([partial(ScriptedEnv, [tuple(result)] * 3)] * 2) as envs:
        envs.reset(seed=0)
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.zeros(2, np.int64))


def without_tracebacks(seen: list[Any]) -> list[Any]:
    """Leave payloads out that hold a pickled failure, whose traceback has other lines."""
    return [(*one[:2], b"" if b"raceback" in one[2] else one[2]) if isinstance(one, tuple) else one for one in seen]


# --- which of the two runs ----------------------------------------------------------------------------


def told(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_variable_leaves_the_extension_aside() -> None:
    code = "from multienv._engine.native import native; print(native is not None)"
    assert told(code, MULTIENV_PUREPYTHON="1") == "False"
    assert told(code, MULTIENV_PUREPYTHON="0") == str(find_spec("multienv._engine._native") is not None)


def test_other_processors_than_x86_need_the_extension() -> None:
    code = """if True:
        import platform
        platform.machine = lambda: "aarch64"
        try:
            import multienv
        except ImportError as error:
            print(error)
    """
    assert told(code, MULTIENV_PUREPYTHON="1").startswith("On aarch64, multienv needs its native extension")
    if native is not None:
        assert told(code) == ""


def test_workers_do_as_their_trainer_does() -> None:
    code = """if True:
        from functools import partial
        from kit import CounterEnv
        from multienv import SubprocessEnv
        from multienv._engine.native import native

        class Env(CounterEnv):
            def has_extension(self):
                return native is not None

        with SubprocessEnv(Env) as env:
            env.reset()
            print(env.call("has_extension") is (native is not None))
    """
    assert told(code, MULTIENV_PUREPYTHON="1") == told(code) == "True"


def test_multienv_can_be_imported_once_more() -> None:
    code = """if True:
        import sys
        import gymnasium
        import multienv
        for name in [name for name in sys.modules if name.partition(".")[0] == "multienv"]:
            del sys.modules[name]
        from multienv import SerialVectorEnv
        with SerialVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2) as envs:
            envs.reset(seed=0)
            for _ in range(30):
                envs.step(envs.action_space.sample())
        print("stepped")
    """
    assert told(code) == "stepped"
