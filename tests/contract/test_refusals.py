"""Wrong calls of every env class: each is refused by a typed error that says what to do, each time, and nothing is lost.

Calls are written as text, so that the table can be read. Refusals that depend on chance stay with their subject:
``test_own_pace.py`` (which envs are under way), ``faults/test_snapshots.py`` (whose snapshot it is).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

import multienv
from invariants.faces import InLoop
from kit import CounterEnv, SpaceEnv, no_leaks
from kit.policies import constant
from multienv import (
    AsyncSubprocessEnvManager,
    MultiEnv,
    RestartPolicy,
    SerialEnv,
    SerialVectorEnv,
    StackedSubprocessEnvManager,
    SubprocessEnv,
    SubprocessVectorEnv,
    SyncSubprocessEnvManager,
)
from multienv.errors import (
    ActionError,
    CallPendingError,
    ClosedError,
    EnvError,
    EnvsFailedError,
    PolicyError,
    ResetNeededError,
    UsageError,
)

pytestmark = pytest.mark.usefixtures("monitor_stays")

LOCK = threading.Lock()


def generator() -> Any:
    """Return what can neither be pickled nor copied."""
    return (number for number in range(3))


# The names in the calls.
KNOWN = {
    **{name: getattr(multienv, name) for name in multienv.__all__},
    "np": np,
    "math": math,
    "partial": partial,
    "constant": constant,
    "generator": generator,
    "LOCK": LOCK,
    "CounterEnv": CounterEnv,
    "CARTPOLE": partial(gymnasium.make, "CartPole-v1"),
}


def run(envs: Any, calls: str) -> None:
    """Make calls that stand one after the other."""
    for call in filter(None, calls.split("; ")):
        eval(f"envs.{call}", KNOWN, {"envs": envs})


class Situation(NamedTuple):
    """A situation of envs of some classes.

    Attributes:
        faces: What makes them.
        begin: Calls that lead to it.
        rows: What is refused then: the error (in a list: all its types), a pattern in its message, the calls.
        then: Calls after that.
        steps: How many steps have been taken then, so that the next one shows that nothing was lost; None: closed.
    """

    faces: list[Callable[[], Any]]
    begin: str
    rows: list[tuple[Any, ...]]
    then: str = ""
    steps: int | None = 0


# --- one env -------------------------------------------------------------------------------------------

ONE = [partial(SubprocessEnv, CounterEnv), partial(SerialEnv, CounterEnv)]
SUBPROCESS, SERIAL, ASYNC = ONE[:1], ONE[1:], [partial(InLoop, CounterEnv)]
NEVER_REPLAYED = partial(SubprocessEnv, CounterEnv, restart=RestartPolicy(on_crash="raise", on_timeout="truncate"))
HALVES = {"step": "step_async(0)", "reset": "reset_async()", "call": "call_async('poke')"}
CALLS = ["step(0)", "reset()", "render()", "call('poke')", "get_attr('horizon')", "set_attr('offset', 0.0)"]
ANY = [*CALLS, *HALVES.values()]
WAITS = [f"{half}_wait()" for half in HALVES]
STEPS = ["step(0)", "rollout(constant, 3)"]
STATE = ["state_dict()", "load_state_dict({})"]
BEGUN = "initialize(); reset(seed=0)"
ENDED = f"{BEGUN}; reset(options={{'start': 9}}); step(0)"
CLOSED = f"{BEGUN}; close()"
NO_SECONDS = ("math.nan", "math.inf", "-1", "2e15", "True", "'1'")
NO_SEEDS = ("-1", "1.5", "'1'", "True", "[1]", "np.array([1, 2])", "np.float64(1)")
NO_LENGTHS = ("0", "-1", "2.5", "'3'")
NOT_INITIALIZED = (UsageError, r"initialize\(\)", *ANY, *WAITS, "observation_space", "action_space")
NO_SPACE = (UsageError, "^action_space: the env is not built yet", "action_space")
NO_EPISODE = (ResetNeededError, r"reset\(\)", *STEPS)
ROLLOUTS = [
    (UsageError, "steps is", *(f"rollout(constant, {length})" for length in NO_LENGTHS)),
    (PolicyError, "not callable", "rollout(None, 3)"),
]
NOT_PICKLED = ["set_attr('x', generator())", "call('poke', generator())", "reset(options={'x': generator()})"]
SITUATIONS = {
    "new": Situation(ONE, "", [NOT_INITIALIZED, NO_SPACE], BEGUN),
    "started": Situation(ONE, "start()", [NOT_INITIALIZED], BEGUN),
    "before a reset": Situation(ONE + ASYNC, "initialize()", [NO_EPISODE], BEGUN),
    "after the end": Situation(ONE + ASYNC, ENDED, [NO_EPISODE], BEGUN),
    "after the end, in halves": Situation(ONE, ENDED, [(ResetNeededError, r"reset\(\)", "step_async(0)")], BEGUN),
    "closed": Situation(
        ONE, CLOSED, [(ClosedError, "closed", *ANY, *WAITS, *STATE, "start()", "initialize()")], "close()", None
    ),
    "closed, async": Situation(
        ASYNC, CLOSED, [(ClosedError, "closed", *STEPS, "reset()", "call('poke')", "initialize()")], "close()", None
    ),
    **{
        f"{half} of one env is pending": Situation(
            SUBPROCESS,
            f"{BEGUN}; {ask}",
            [([CallPendingError, AlreadyPendingCallError, ValueError], f"{half}_wait", *ANY, *STATE)],
            f"{half}_wait()",
            int(half == "step"),
        )
        for half, ask in HALVES.items()
    },
    "nothing of one env is pending": Situation(
        SUBPROCESS, BEGUN, [(NoAsyncCallError, f"{half}_async", f"{half}_wait()") for half in HALVES]
    ),
    "arguments of one env": Situation(
        SUBPROCESS,
        BEGUN,
        [
            *((UsageError, "seed", f"reset(seed={seed})", f"reset_async(seed={seed})") for seed in NO_SEEDS),
            (UsageError, "pickle", *NOT_PICKLED, "call_async('poke', generator())"),
            (UsageError, "pickle", "rollout(partial(print, generator()), 3)"),
            (NoAsyncCallError, "call_async", "call_wait()"),
            (UsageError, "state_dict", *(f"load_state_dict({state})" for state in ("None", "{'version': 0}", "[{}]"))),
            *ROLLOUTS,
        ],
    ),
    "timeouts of one env": Situation(
        SUBPROCESS,
        f"{BEGUN}; step_async(0)",
        [(UsageError, "timeout", *(f"step_wait({seconds})" for seconds in NO_SECONDS))],
        "step_wait()",
        1,
    ),
    "timeouts of initialize()": Situation(
        SUBPROCESS, "", [(UsageError, "timeout", *(f"initialize({seconds})" for seconds in NO_SECONDS))], BEGUN
    ),
    "arguments of an async env": Situation(
        ASYNC,
        BEGUN,
        [
            (ActionError, "Nothing was sent", "step([1])", "step(generator())", "step(LOCK)"),
            (ValueError, "deadline", "step(1, deadline=-1.0)"),
            ([AttributeError, EnvError], "nothing_of_the_kind", "call('nothing_of_the_kind')"),
        ],
    ),
    "state of an env in this process": Situation(
        SERIAL, BEGUN, [(UsageError, "forked", "snapshot()"), (UsageError, "state_dict", "load_state_dict({})")]
    ),
    "state of an env that is never replayed": Situation(
        [NEVER_REPLAYED], BEGUN, [(UsageError, "journal_limit", "state_dict()")]
    ),
}

# --- several envs --------------------------------------------------------------------------------------


def batches(env_fn: Any = CounterEnv, **options: Any) -> list[Callable[[], Any]]:
    kinds = [partial(SubprocessVectorEnv, envs_per_worker=share) for share in (1, 2)]
    return [partial(kind, [env_fn] * 2, **options) for kind in (*kinds, SerialVectorEnv)]


LIST, BATCHES = [lambda: MultiEnv([CounterEnv(), SubprocessEnv(CounterEnv)])], batches()
RESET, RESET_AND_CLOSED = "reset(seed=0)", "reset(seed=0); close()"
CALLS_OF_ALL = ["step([0, 0])", *CALLS[1:]]
HALVES_OF_ALL = {**HALVES, "step": "step_async([0, 0])"}
PACED = ["send([0, 0])", "recv()"]
MISSHAPEN = ("np.zeros(3, int)", "[0]", "[0, 1, 0]", "np.zeros((2, 2), int)", "[]", "'01x'")
MASK = r"`options\['reset_mask'\]` must "
MASKS = [
    (TypeError, MASK + "be a numpy array", "[True, False]"),
    (ValueError, MASK + r"have shape `\(2,\)`, got \(3,\)", "np.ones(3, bool)"),
    (ValueError, MASK + r"have shape `\(2,\)`, got \(1, 2\)", "np.ones((1, 2), bool)"),
    (TypeError, MASK + "have `dtype=np.bool_`, got int64", "np.array([1, 0])"),
    (ValueError, "with at least one True value", "np.zeros(2, bool)"),
]
SITUATIONS |= {
    "closed list": Situation(LIST, RESET_AND_CLOSED, [(ClosedError, "closed", *CALLS_OF_ALL)], "close()", None),
    "arguments of a list": Situation(
        LIST,
        RESET,
        [
            (ActionError, "2 envs", *(f"step({one})" for one in ("[]", "[0]", "[0] * 3", "np.zeros(4, int)", "None"))),
            (ActionError, "2 envs", "step(np.array(2))", "step(0)", "step(generator())"),
            (ActionError, "Nothing was sent", "send([0, generator()])", "send([0, LOCK])"),
            *((ValueError, "seed", f"reset(seed={seed})") for seed in ("[1]", "'123'", "1.5", "-1", "True")),
            *((ValueError, "seed", f"reset(seed={seed})") for seed in ("[1, 2, 3]", "[1, -1]", "[1, '2']")),
            (UsageError, "1 items for 2 envs", "reset(options=[{'start': 1}])"),
            *(((TypeError, ValueError), "", f"reset(options={given})") for given in ("[1, 1]", "3", "'ab'")),
            (UsageError, "values", "set_attr('gain', [1.0])"),
        ],
    ),
    **{
        f"{half} of a batch is pending": Situation(
            BATCHES,
            f"{RESET}; {ask}",
            [
                *(
                    (
                        AlreadyPendingCallError,
                        f"Calling `{other}_async` while waiting for a pending call to `{half}`",
                        call,
                    )
                    for other, call in HALVES_OF_ALL.items()
                ),
                (AlreadyPendingCallError, half, "set_attr('offset', 1.0)"),
                *([] if half == "reset" else [(CallPendingError, f"{half}_wait", *PACED)]),  # recv() takes a reset
            ],
            f"{half}_wait()",
            int(half == "step"),
        )
        for half, ask in HALVES_OF_ALL.items()
    },
    "nothing of a batch is pending": Situation(
        BATCHES,
        RESET,
        [
            (NoAsyncCallError, f"Calling `{half}_wait` without any prior call to `{half}_async`", f"{half}_wait()")
            for half in HALVES
        ],
    ),
    "closed batch": Situation(
        batches(partial(CounterEnv, render_mode="rgb_array")),
        RESET_AND_CLOSED,
        [
            (
                [ClosedError, ClosedEnvironmentError],
                "Trying to operate on `CLASS`, after a call to `close",
                *CALLS_OF_ALL,
            ),
            (ClosedError, "CLASS", "get_images()", *PACED),
        ],
        "close()",
        None,
    ),
    "batch before its first reset": Situation(
        BATCHES,
        "num_envs",
        [
            (
                ResetNeededError,
                r"(?s)^((?!The next step).)*there is no episode yet. Call reset\(\) first",
                "step([0, 0])",
                "rollout(constant, 3)",
            ),
            (UsageError, "no env is under way", "recv()"),
        ],
        RESET,
    ),
    "batch whose ended envs nobody resets": Situation(
        batches(autoreset_mode="Disabled"),
        f"{RESET}; reset(options={{'start': 9, 'reset_mask': np.array([True, False])}}); step([0, 0])",
        [
            (ResetNeededError, r"(?s)env 0: .*no episode in this env.*reset_mask", "step([0, 0])"),
            (UsageError, "autoreset_mode='DISABLED'", "rollout(constant, 3)"),
        ],
        RESET,
    ),
    "arguments of a batch": Situation(
        BATCHES,
        RESET,
        [
            ([ActionError, TypeError], "action", "step(0)", "step(np.int64(1))", "step(None)"),  # as gymnasium has it
            (ActionError, "action", *(f"step({actions})" for actions in MISSHAPEN)),
            (ActionError, "Nothing was sent", "send([0, generator()])", "send([0, LOCK])"),
            *((error, words, f"reset(options={{'reset_mask': {mask}}})") for error, words, mask in MASKS),
            (ValueError, "the length must match num_envs=2 but got length=1.", "reset(seed=[1])"),
            (ValueError, "Seed must be greater or equal to zero, actual value: -1", "reset(seed=-1)"),
            (ValueError, "Seed must be a python integer, actual type: <class 'float'>", "reset(seed=[1, 1.5])"),
            (ValueError, "Seed must be a python integer, actual type: <class 'bool'>", "reset(seed=True)"),
            (UsageError, "1 items for 2 envs", "reset(options=[None])"),
            *(((TypeError, ValueError), "", f"reset(options={given})") for given in ("[1, 1]", "3", "'ab'")),
            (
                ValueError,
                "Values must be .* length equal .*Got `3` values for 2",
                "set_attr('offset', (1.0, 2.0, 3.0))",
            ),
            (UsageError, "`1` values for 2 environments", "set_attr('offset', [1.0], [0, 1])"),
            *((UsageError, "indices", f"get_attr('offset', {one})") for one in ([0, 0], [5], [-1])),
            *((UsageError, "indices", f"set_attr('offset', 1.0, {one})") for one in ([0, 0], [5], [-1])),
            *((ValueError, f"use `{name}`", f"call('{name}')") for name in ("reset", "step", "close")),
            *ROLLOUTS,
        ],
        "step((np.int64(1), 0)); step(np.array([1, 0]))",
        2,
    ),
    "what cannot be pickled for one env of a batch": Situation(
        BATCHES[:2],
        f"{RESET}; set_attr('mark', 0)",
        [
            (UsageError, r"set_attr\(\).*Nothing was sent", "set_attr('mark', [1, LOCK])"),
            (UsageError, "cannot be pickled", "rollout(partial(print, generator()), 3)"),
        ],
        "get_attr('mark') == (0, 0) or 1 / 0",
    ),
}

# --- managers ------------------------------------------------------------------------------------------

KINDS = (AsyncSubprocessEnvManager, SyncSubprocessEnvManager)
MANAGERS = [partial(kind, [partial(CounterEnv, horizon=1)] * 2, episode_num=1) for kind in KINDS]
BOTH, VOID = "step({0: 1, 1: 1})", "env_states == {0: 0, 1: 0} and envs.closed and not envs.done or 1 / 0"
NO_ENVS = ["step({0: 1})", "ready_obs", "ready_env", "reset()", "ready_imgs", "call('poke')", "statistics()"]
SITUATIONS |= {
    "not launched": Situation(MANAGERS, VOID, [(ClosedError, r"launch\(\)", *NO_ENVS)], "launch()"),
    "closed manager": Situation(
        MANAGERS, f"launch(); close(); {VOID}; close()", [(ClosedError, r"launch\(\)", *NO_ENVS)], "launch()"
    ),
    "launched": Situation(
        MANAGERS,
        "launch()",
        [
            (UsageError, "launched already", "launch()"),
            *((UsageError, "step", f"step({{{one}: 1}})") for one in ("4", "-1", "'a'", "None")),
            *((AttributeError, "", f"step({actions})") for actions in ("[1, 1]", "None", "3")),
            *((UsageError, "reset", f"reset({{{one}}})") for one in ("2: None", "'a': {}", "0: 5")),
            *((UsageError, "reset", f"reset({{0: {{{one}}}}})") for one in ("'sed': 1", "'seed': -1")),
            *((UsageError, "seed", f"seed({seed})") for seed in ("None", "'12'", "-1", "[1]", "{2: 1}")),
            (UsageError, "RUN", "step({})"),
            (UsageError, "it is a method", "get_attr('poke')"),
            (UsageError, "step", "call('step', 1)"),
            (AttributeError, "nonsense", "get_attr('nonsense')"),
        ],
    ),
    "all episodes are done": Situation(
        MANAGERS,
        f"launch(); {BOTH}",
        [(UsageError, "DONE", "step({})"), (ResetNeededError, "all its episodes", "step({0: 1})")],
        "reset()",
    ),
    "batches of a manager": Situation(
        [partial(StackedSubprocessEnvManager, [CounterEnv] * 2)],
        "launch()",
        [
            (ActionError, "Nothing was sent", f"ready_obs_id and envs.step({actions})")
            for actions in ("[1]", "[1, 1, 1]", "np.ones((3,))", "1", "None", "np.int64(1)")
        ],
    ),
}


def name_of(face: Any) -> str:
    return str(getattr(getattr(face, "func", face), "__name__", "SubprocessVectorEnv"))


def assert_goes_on(envs: Any, steps: int) -> None:
    """Fail unless the next step of all envs is the one after so many."""
    if hasattr(envs, "launch"):
        assert len(envs.step([1, 1] if isinstance(envs, StackedSubprocessEnvManager) else {0: 1, 1: 1})) == 2
        return
    count = getattr(envs, "num_envs", 0)
    observation = envs.step([0] * count if count else 0)[0]
    assert [one[0] for one in (observation if count else [observation])] == [steps + 1] * (count or 1)


@pytest.mark.parametrize(
    ("name", "face"), [(name, face) for name, one in SITUATIONS.items() for face in one.faces], ids=name_of
)
def test_wrong_call_is_refused_each_time_and_nothing_is_lost(name: str, face: Callable[[], Any]) -> None:
    situation = SITUATIONS[name]
    with contextlib.closing(face()) as envs:
        run(envs, situation.begin)
        for errors, words, *calls in situation.rows:
            for call in 2 * calls:
                with pytest.raises(Exception, match=words.replace("CLASS", type(envs).__name__) or None) as caught:
                    run(envs, call)
                for error in errors if isinstance(errors, list) else [errors]:
                    assert isinstance(caught.value, error), f"{call}: {caught.value!r}"
        run(envs, situation.then)
        if situation.steps is not None:
            assert_goes_on(envs, situation.steps)


@pytest.mark.parametrize(
    ("space", "right", "wrong"),
    [
        (spaces.Text(5, charset="ab"), ["a", "b"], ["a", LOCK]),
        (spaces.Box(-1.0, 1.0, (2,)), np.zeros((2, 2), np.float32), np.array([[0.0, 0.0], [0.0, LOCK]], object)),
    ],
)
@pytest.mark.parametrize("face", batches(), ids=name_of)
def test_actions_of_a_batch_of_which_one_cannot_be_pickled_are_not_sent(
    face: Any, space: Any, right: Any, wrong: Any
) -> None:
    """Not even to the workers before."""
    env_fns = [partial(SpaceEnv, action_space=space, tells=False)] * 2
    with face.func(env_fns, **face.keywords) as envs, SerialVectorEnv(env_fns) as twin:
        for one in (envs, twin):
            one.reset(seed=0)
        with pytest.raises(ActionError, match="Nothing was sent"):
            envs.step(wrong)
        np.testing.assert_equal(envs.step(right), twin.step(right))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("face", BATCHES, ids=name_of)
def test_close_of_a_batch_with_a_call_pending_warns_and_closes(face: Callable[[], Any], half: str) -> None:
    envs = face()
    run(envs, f"{RESET}; {HALVES_OF_ALL[half]}")
    with pytest.raises(AlreadyPendingCallError) as pending:
        run(envs, HALVES_OF_ALL[half])
    assert pending.value.name == half
    with pytest.warns(UserWarning, match=f"Calling `close` while waiting for a pending call to `{half}`"):
        envs.close()
    envs.close()


# --- what is built wrongly -----------------------------------------------------------------------------

NOT_BUILT: list[tuple[Any, ...]] = [
    (ValueError, "worker. runs AsyncVectorEnv's own", "SubprocessVectorEnv([CARTPOLE], worker=print)"),
    (ValueError, "sometimes", "SubprocessVectorEnv([CARTPOLE], autoreset_mode='sometimes')"),
    (ValueError, "envs_per_worker", "SubprocessVectorEnv([CARTPOLE], envs_per_worker=0)"),
    (ValueError, "envs_per_worker", "SubprocessVectorEnv([CARTPOLE], envs_per_worker='all')"),
    (ValueError, "thread", "SubprocessVectorEnv([CARTPOLE], context='thread')"),
    (ValueError, "be an integer or None", "SubprocessVectorEnv([CARTPOLE], max_concurrency=2.5)"),
    (ValueError, "be a positive or None, got 0", "SubprocessVectorEnv([CARTPOLE], max_concurrency=0)"),
    (
        UsageError,
        "envs_per_worker=1",
        "SubprocessVectorEnv([CARTPOLE] * 2, envs_per_worker=2, restart=RestartPolicy(recycle_after_episodes=3))",
    ),
    *((UsageError, "env_fns is empty", f"{face}([])") for face in ("SubprocessVectorEnv", "SerialVectorEnv")),
    *(
        (UsageError, "CartPole", f"{face}([CARTPOLE, 'CartPole-v1'])")
        for face in ("SubprocessVectorEnv", "SerialVectorEnv")
    ),
    *(
        (UsageError, words, f"{face}({given})")
        for face in ("SubprocessVectorEnv", "SerialVectorEnv", "create_subprocess_envs", "SyncSubprocessEnvManager")
        for words, given in ((r"list .*\[fn\] \* n", "CARTPOLE"), ("list ", "'CartPole-v1'"), ("list ", "None"))
    ),
    *(
        (TypeError, r"takes only env_fns? by position.*make_vec\('CartPole-v1', 4\)", f"{face}('CartPole-v1', 4)")
        for face in ("SubprocessVectorEnv", "SerialVectorEnv", "create_subprocess_envs", "SubprocessEnv")
    ),
    (UsageError, r"make_vec\('CartPole-v1', n\)", "SubprocessVectorEnv('CartPole-v1')"),
    (TypeError, "'deadline'. Did you mean deadlines=", "SubprocessVectorEnv([CARTPOLE], deadline=1.0)"),
    (TypeError, "'deadline' is no option and .* Did you mean deadlines=", "make_vec('CartPole-v1', 2, deadline=1.0)"),
    (UsageError, "deadlines is 1.0; give deadlines=Deadlines", "make_vec('CartPole-v1', 2, deadlines=1.0)"),
    (UsageError, "deadlocks", "SubprocessEnv(CounterEnv, context='fork')"),
    (UsageError, "restart", "create_subprocess_envs([CounterEnv] * 3, restart='never')"),
    (UsageError, "is None; give a function", "create_subprocess_envs([CounterEnv, None])"),
    (TypeError, "share_memory", "create_subprocess_envs([CounterEnv], share_memory=True)"),
    *((TypeError, "gymnasium.Env", f"MultiEnv([{env}])") for env in ("CounterEnv", "None", "*'CartPole-v1'")),
    (TypeError, "gymnasium.Env", "MultiEnv([CounterEnv(), object()])"),
    (UsageError, "twice|same", "MultiEnv([CounterEnv()] * 2)"),
    (UsageError, "env", "MultiEnv([])"),
    *(
        (UsageError, "max_workers", f"MultiEnv([CounterEnv()], max_workers={n})")
        for n in ("0", "-1", "1.5", "'2'", "True")
    ),
    *(
        (UsageError, "autoreset_mode", f"MultiEnv([CounterEnv()], autoreset_mode={m})")
        for m in ("'sometimes'", "None", "1")
    ),
    (UsageError, r"choose 'subprocess' \('async'\), 'serial'", "make_vec('CartPole-v1', 2, 'threads')"),
    (UsageError, "'vector_entry_point'; choose", "make_vec('CartPole-v1', vectorization_mode='vector_entry_point')"),
    (UsageError, "num_envs is 0", "make_vec('CartPole-v1', 0)"),
    (UsageError, "num_envs is 2.0", "make_vec('CartPole-v1', 2.0)"),
    (UsageError, "17 is no id", "make_vec(17)"),
    (gymnasium.error.Error, "NoSuchEnv", "make_vec('NoSuchEnv-v7')"),
    (EnvsFailedError, "no_such_argument", "make_vec('CartPole-v1', no_such_argument=1)"),
    (UsageError, "worker", "make_vec('CartPole-v1', vector_kwargs={'worker': print})"),
]


@pytest.mark.parametrize(("error", "words", "call"), NOT_BUILT)
def test_envs_that_make_no_sense_are_refused_and_leave_nothing(error: type[Exception], words: str, call: str) -> None:
    with no_leaks(), pytest.raises(error, match=words):
        eval(call, KNOWN)
