"""A crash report run again, in this very process, by the host that a worker runs."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pdb
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator
from gymnasium.vector.utils import batch_space

from multienv.errors import ReportError
from multienv.processes.environment import worker_environment
from multienv.recovery.verification import difference
from multienv.reports.read import Report
from multienv.reports.table import Row
from multienv.wire.actions import action_decoder, left_out
from multienv.wire.batch import BatchLayout, places, row_of
from multienv.wire.messages import (
    FAILED,
    IRREGULAR,
    KIND_OF_REQUEST_AT,
    REPLY,
    RESET,
    STEP,
    STEPPED,
    Failure,
    Initialize,
    Reset,
    evidence_of,
    pack_message,
    seq_of,
    unpack_message,
    unpack_value,
)
from multienv.wire.observations import Placement, irregular_parts, reader, reward_of
from multienv.worker.host import Host
from multienv.worker.registrations import register

EnvFn = Callable[[], "gymnasium.Env[Any, Any]"]
_HOW_TO_BUILD = (
    "Give --env ID, --env module:ID or --env module:function with what builds it; or --trust, which runs the report's "
    "own env_fn, if you know who wrote the report."
)


# --- what builds the env ------------------------------------------------------------------------


def env_function(report: Report, env: str | None = None, *, trust: bool = False) -> EnvFn | list[EnvFn]:
    """What builds the env of a report.

    Args:
        report: Read with the same ``trust``.
        env: An id, ``module:id``, or ``module:function``. Of the report's own id its arguments and wrappers are taken.
        trust: Without ``env``: the report's own ``env_fn``, if it holds one.

    Raises:
        ReportError: There is no way to the env; the message says what to give.
    """
    spec = (report.document["env"] or {}).get("spec")
    if env is not None:
        return _named(env, spec, trust=trust)
    if trust and report.env_fn is not None:
        return _trusted(report)
    if spec is None:
        raise ReportError(f"{report.path} does not say how to build the env: it has no spec. {_HOW_TO_BUILD}")
    return _from_spec(spec, trust=trust)


def _named(name: str, spec: Any, *, trust: bool) -> EnvFn:
    module_name, _, rest = name.rpartition(":")
    module: Any = None
    if module_name:
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` has it
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ReportError(f"--env {name}: {module_name} cannot be imported: {error}.") from error
    if rest in gymnasium.registry:
        same = isinstance(spec, dict) and spec.get("id") == rest
        return _from_spec(spec, trust=trust) if same else partial(gymnasium.make, rest)
    function = getattr(module, rest, None)
    if not callable(function):
        where = f"{module_name} has no such function, nor" if module_name else "there is no ':' in it, nor"
        raise ReportError(f"--env {name}: {where} is an env of that id registered. {_HOW_TO_BUILD}")
    return function  # type: ignore[no-any-return]


def _trusted(report: Report) -> EnvFn | list[EnvFn]:
    """As in the worker, the world is as the trainer saw it."""
    document = report.document
    sys.path += [entry for entry in document["path"] if entry not in sys.path]
    sys.argv[:] = document["arguments"]
    with contextlib.suppress(OSError):
        os.chdir(document["directory"])
    try:
        for registrations in report.registrations:
            register(registrations)
        function: EnvFn | list[EnvFn] = cloudpickle.loads(report.env_fn)
    except Exception as error:  # unpickling runs foreign code
        raise ReportError(
            f"The env_fn in {report.path} cannot be loaded: {type(error).__name__}: {error}. {_HOW_TO_BUILD}"
        ) from error
    return function


def _from_spec(fields: Any, *, trust: bool) -> EnvFn:
    """The spec names functions to be called: without trust only those that are known here, under the same name."""
    try:
        fields = dict(fields)
        wrappers = tuple(WrapperSpec(**wrapper) for wrapper in fields.pop("additional_wrappers"))
        registered = gymnasium.registry.get(fields["id"])
        if registered is not None:
            fields |= {"entry_point": registered.entry_point, "vector_entry_point": registered.vector_entry_point}
        elif not trust:
            raise ReportError(
                f"The env {fields['id']!r} is not registered here; its module does that when it is imported. "
                f"{_HOW_TO_BUILD}"
            )
        for wrapper in wrappers:
            if not (trust or _is_gymnasiums(wrapper.entry_point)):
                raise ReportError(
                    f"The env has a wrapper {wrapper.entry_point}, which is not gymnasium's own. {_HOW_TO_BUILD}"
                )
        spec = EnvSpec(**fields)
        spec.additional_wrappers = wrappers
    except (TypeError, KeyError, ValueError, AttributeError, gymnasium.error.Error) as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(f"The env's spec is damaged: {type(error).__name__}: {error}. {_HOW_TO_BUILD}") from error
    return partial(gymnasium.make, spec)


def _is_gymnasiums(entry_point: str) -> bool:
    if not entry_point.startswith("gymnasium.wrappers."):
        return False
    with contextlib.suppress(Exception):  # it is nothing that can be imported
        wrapper: Any = load_env_creator(entry_point)
        return isinstance(wrapper, type) and issubclass(wrapper, gymnasium.Wrapper)
    return False


# --- the replay -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the fatal request came to, where the process outlived it.

    Attributes:
        text: In words.
        failure: The exception, where it raised one.
    """

    text: str
    failure: Failure | None = None


class Replay:
    """Runs a report's requests.

    Attributes:
        env: Once it is built; the list of them, if there are several in the process.
        fatal: The request the process was lost in; ``None`` if the env was being built.
        length: How many come before that.
        differences: Where the answers were others than recorded, in words.
        unknown: How many answers could be compared in part only, because they were pickled.
        observation: The last one.
    """

    def __init__(self, report: Report, env_fn: EnvFn | list[EnvFn]) -> None:
        """Build nothing yet; ``env_fn`` is a list where there is one for each."""
        if report.rows is None:
            raise ReportError(
                f"{report.path} holds no journal to be replayed: the RestartPolicy's journal_limit is 0, or the "
                "episode had outgrown that or the replay_limit, or too many envs were lost at once."
            )
        self.env: Any = None
        self._action_space: Any = None
        self.observation: Any = None
        self.differences: list[str] = []
        self.unknown = 0
        self.fatal: Row | None = report.rows[-1] if report.rows else None
        self._before = report.rows[:-1]
        self.length = len(self._before)
        self._document = report.document
        self._group = report.group
        size = 1 if report.group is None else report.group.size
        env_fns = env_fn if isinstance(env_fn, list) else [env_fn] * size
        self.envs: list[Any] = [None] * size
        building = [partial(self._built, slot, one) for slot, one in enumerate(env_fns)]
        self._host = Host(env_fn=building[0] if report.group is None else building)
        self._read: Callable[[bytes, int], Any] = lambda reply, seq: None

    def _built(self, slot: int, env_fn: EnvFn) -> Any:
        self.envs[slot] = env_fn()
        return self.envs[slot]

    def build(self) -> Outcome:
        """Build the env, as a worker does; with a failure it has not been."""
        seeds, inline_limit = self._document["process_seeds"], self._document["inline_limit"]
        os.environ.update(worker_environment())
        message = Initialize(None, seeds and tuple(seeds), None, inline_limit, group=self._group)
        reply = self._host.answer(pack_message(0, message))
        if _kind(reply) == FAILED:
            failure = unpack_value(reply)
            return Outcome(f"env_fn raised {failure.type_name}: {failure.text}", failure)
        space = self.envs[0].observation_space
        if self._group is None:
            self.env, self._action_space = self.envs[0], self.envs[0].action_space
            self._read = reader(space, Placement.of(space, inline_limit), self._host.block)
            return Outcome("The env was built")
        self.env, self._action_space = self.envs, batch_space(self.envs[0].action_space, self._group.size)
        space = space if self._group.space is None else self._group.space
        layout = BatchLayout.of(space, self._group.num_envs, with_observations=self._group.with_observations)
        assert self._host.block is not None
        sides, first = places(layout, self._host.block.view), self._group.first
        rows = range(first, first + self._group.size)
        self._read = lambda reply, seq: [row_of(sides[seq & 1].observations, row) for row in rows]
        return Outcome("The env was built")

    def run(self) -> Iterator[int]:
        """Run all requests but the last; yields how many have been."""
        step = 0
        for number, row in enumerate(self._before, start=1):
            reply = self._answer(row.frame)
            kind = row.frame[KIND_OF_REQUEST_AT]
            step = step + 1 if kind == STEP else 0 if kind == RESET or self._is_reset(row.frame) else step
            told = self._compare(row, evidence_of(reply))
            if told:
                self.differences.append(f"{told} at request {number} of {self.length} (step {step} of its episode)")
            yield number

    def _is_reset(self, frame: bytes) -> bool:
        return frame[KIND_OF_REQUEST_AT] != STEP and isinstance(unpack_message(frame), Reset)

    def _compare(self, row: Row, evidence: bytes) -> str:
        if row.known:
            return difference(row.evidence, evidence)
        self.unknown += 1
        before, after = REPLY.unpack_from(row.evidence), REPLY.unpack_from(evidence)
        return "" if before[3:5] == after[3:5] else "the flags differ"

    def _answer(self, frame: bytes) -> bytes:
        reply = self._host.answer(frame)
        if _kind(reply) == STEPPED:
            if not REPLY.unpack_from(reply)[4] & IRREGULAR:
                self.observation = self._read(reply, seq_of(frame))
            else:
                found = irregular_parts(reply)[0]
                self.observation = found if self._group is None else list(map(pickle.loads, found))
        return reply

    @property
    def action(self) -> Any:
        """That of the fatal request; ``None`` if it is not a step."""
        if self.fatal is None or self.fatal.frame[KIND_OF_REQUEST_AT] != STEP:
            return None
        return action_decoder(self._action_space)(left_out(self.fatal.frame)[0])

    @property
    def request(self) -> str:
        """The fatal request, and where it came, in words."""
        loss = self._document["loss"]
        command = loss.get("command") or "the next request"
        if self.fatal is None:
            return "building the env"
        if self.fatal.frame[KIND_OF_REQUEST_AT] == STEP:
            what = f"step({self.action!r})"
        else:
            message = unpack_message(self.fatal.frame)
            what = f"{command}: {message!r:.500}"
        after = "" if loss.get("step") is None else f", after {loss['step']} steps of its episode"
        return f"{what}{after}" + ("" if loss.get("seed") is None else f", last seed {loss['seed']}")

    def run_fatal(self) -> Outcome:
        """Run the request that the process was lost in; if the fault comes again, this is the end of this process."""
        assert self.fatal is not None
        with self._bounded():
            reply = self._answer(self.fatal.frame)
        if _kind(reply) == FAILED:
            failure = unpack_value(reply)
            return Outcome(f"it raised {failure.type_name}: {failure.text}", failure)
        if _kind(reply) != STEPPED:
            return Outcome("it returned")
        _, _, _, _, _, tag, reward = REPLY.unpack_from(reply)
        return Outcome(f"it returned, with reward {reward_of(tag, reward)!r}")

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """What hung then and hangs again is ended with its stack told, by a thread that needs no interpreter."""
        deadline = self._document["request"].get("deadline")
        hung = self._document["loss"].get("cause") == "hung" and isinstance(deadline, int | float)
        if hung:
            faulthandler.dump_traceback_later(2 * deadline + 1, exit=True)
        try:
            yield
        finally:
            if hung:
                faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        """A debugger with ``env``, ``action`` and ``observation`` at hand."""
        env, action, observation = self.env, self.action, self.observation
        pdb.Pdb().set_trace(sys._getframe())
        del env, action, observation  # the debugger stands here: `env.step(action)` is what comes next

    def close(self) -> None:
        """Close the env."""
        self._host.close_env()


def _kind(reply: bytes) -> int:
    kind: int = REPLY.unpack_from(reply)[3]
    return kind
