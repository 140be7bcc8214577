"""What happens when a worker dies, hangs or raises: multienv and its peers, as a table.

    python benchmarks/fault_table.py                          # all that are installed
    python benchmarks/fault_table.py --only multienv,gymnasium --json faults.json
    python benchmarks/fault_table.py --python ../venv-of-peers/bin/python   # look there too for what is not installed here

Each cell is a program of its own: four envs, six steps, the fault in env 1 at step 3. What it prints is what is told. A
call that has not returned after ``--limit`` seconds "waits for ever". All processes that such a program has started carry
a mark in their environment; those that are alive five seconds after its end are orphans. ``docs/comparison.md`` has the
output. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import gymnasium
import numpy as np

from multienv.testing import FaultyEnv

NUM_ENVS, STEPS, FAULTY, AT = 4, 6, 1, 3
DEADLINE = 2.0  # seconds that a step may take, where the peer can be told
LATE = 5.0  # seconds that a late step takes
MARK = "MULTIENV_FAULT_TABLE"
SILENCE = 65.0  # multienv tells of a silent hang after 60 s


class SlowOnce(FaultyEnv):
    """Takes its time once."""

    def step(self, action: Any) -> Any:
        """Sleep first, if nobody has slept yet."""
        if self.steps + 1 == self.at and self._may_strike():
            time.sleep(LATE)
        return super().step(action)


class Garbage(FaultyEnv):
    """Writes 64 bytes to each pipe and socket of its process, once."""

    def step(self, action: Any) -> Any:
        """Write first, if nobody has written yet."""
        if self.steps + 1 == self.at and self._may_strike():
            for name in os.listdir("/proc/self/fd"):
                try:
                    mode = os.fstat(int(name)).st_mode
                    if int(name) > 2 and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
                        os.set_blocking(int(name), False)
                        os.write(int(name), b"\xff" * 64)
                        os.set_blocking(int(name), True)
                except OSError:
                    continue
        return super().step(action)


@dataclass(frozen=True)
class Case:
    """One fault."""

    title: str
    env: Callable[..., gymnasium.Env[Any, Any]] = FaultyEnv
    fault: str | None = None
    deadline: bool = False
    limit: float | None = None


CASES = {
    "calm": Case("undisturbed"),
    "kill": Case("a worker is SIGKILLed in a step", fault="kill"),
    "segfault": Case("an env segfaults", fault="segfault"),
    "garbage": Case("an env writes 64 bytes to each pipe and socket of its process", env=Garbage),
    "raise": Case("an env raises", fault="raise"),
    "hang": Case("an env hangs; a deadline of 2 s, where there is one", fault="hang", deadline=True),
    "silent": Case("an env hangs; no deadline", fault="hang", limit=SILENCE),
    "late": Case("a step takes 5 s; a deadline of 2 s, where there is one", env=SlowOnce, deadline=True),
    "orphans": Case("the trainer is SIGKILLed while an env hangs", fault="hang"),
    "ctrl_c": Case("Ctrl-C in a step, which the trainer catches; then the next step", env=SlowOnce),
}


# --- the peers ------------------------------------------------------------------------------------


class Multienv:
    """multienv.SubprocessVectorEnv."""

    name, package, deadline = "multienv", "multienv", "Deadlines(step=…)"

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        from multienv import Deadlines, SubprocessVectorEnv

        self.envs = SubprocessVectorEnv(env_fns, envs_per_worker=1, deadlines=Deadlines(step=seconds), reports="")

    def reset(self) -> Any:
        return self.envs.reset(seed=0)[0]

    def step(self, action: int) -> Any:
        observations, _, terminated, truncated, _ = self.envs.step(np.full(NUM_ENVS, action))
        return observations, terminated | truncated

    def close(self) -> None:
        self.envs.close()


class Gymnasium:
    """gymnasium.vector.AsyncVectorEnv."""

    name, package, deadline = "gymnasium AsyncVectorEnv", "gymnasium", "step_wait(timeout=…)"

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        self.envs, self.seconds = gymnasium.vector.AsyncVectorEnv(env_fns), seconds

    def reset(self) -> Any:
        return self.envs.reset(seed=0)[0]

    def step(self, action: int) -> Any:
        self.envs.step_async(np.full(NUM_ENVS, action))
        observations, _, terminated, truncated, _ = self.envs.step_wait(timeout=self.seconds)
        return observations, terminated | truncated

    def close(self) -> None:
        self.envs.close()


class StableBaselines3:
    """stable_baselines3's SubprocVecEnv."""

    name, package, deadline = "Stable-Baselines3 SubprocVecEnv", "stable_baselines3", None

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        self.envs = SubprocVecEnv(list(env_fns))
        self.envs.seed(0)

    def reset(self) -> Any:
        return self.envs.reset()

    def step(self, action: int) -> Any:
        observations, _, done, _ = self.envs.step(np.full(NUM_ENVS, action))
        return observations, done

    def close(self) -> None:
        self.envs.close()


class Tianshou:
    """tianshou.env.SubprocVectorEnv; its ``timeout`` is for how long to wait for the first env, not for a hung one."""

    name, package, deadline = "Tianshou SubprocVectorEnv", "tianshou", None

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        from tianshou.env import SubprocVectorEnv

        self.envs = SubprocVectorEnv(list(env_fns))
        self.envs.seed(0)

    def reset(self) -> Any:
        return self.envs.reset()[0]

    def step(self, action: int) -> Any:
        observations, _, terminated, truncated, _ = self.envs.step(np.full(NUM_ENVS, action))
        return observations, terminated | truncated

    def close(self) -> None:
        self.envs.close()


class TorchRL:
    """torchrl.envs.ParallelEnv."""

    name, package, deadline = "TorchRL ParallelEnv", "torchrl", "BATCHED_PIPE_TIMEOUT=…"

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        if seconds is not None:
            os.environ["BATCHED_PIPE_TIMEOUT"] = str(seconds)
        from torchrl.envs import ParallelEnv

        self.envs = ParallelEnv(NUM_ENVS, [partial(_torchrl_env, env_fn) for env_fn in env_fns])
        self.envs.set_seed(0)

    def reset(self) -> Any:
        self.latest = self.envs.reset()
        return self.latest["observation"].numpy()

    def step(self, action: int) -> Any:
        import torch
        from torchrl.envs.utils import step_mdp

        self.latest["action"] = torch.full((NUM_ENVS,), action)
        outcome = self.envs.step(self.latest)
        self.latest = step_mdp(outcome)
        return outcome["next", "observation"].numpy(), outcome["next", "done"].numpy().ravel()

    def close(self) -> None:
        self.envs.close()


def _torchrl_env(env_fn: Callable[[], Any]) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(env_fn(), categorical_action_encoding=True)


class PufferLib:
    """pufferlib.vector with its Multiprocessing backend."""

    name, package, deadline = "PufferLib Multiprocessing", "pufferlib", None

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        import pufferlib.vector

        self.envs = pufferlib.vector.make(
            [partial(_puffer_env, env_fn) for env_fn in env_fns],
            env_args=[[]] * NUM_ENVS,
            env_kwargs=[{}] * NUM_ENVS,
            backend=pufferlib.vector.Multiprocessing,
            num_envs=NUM_ENVS,
            num_workers=NUM_ENVS,
            overwork=True,
        )

    def reset(self) -> Any:
        return self.envs.reset(seed=0)[0]

    def step(self, action: int) -> Any:
        observations, _, terminated, truncated, _ = self.envs.step(np.full(NUM_ENVS, action))
        return observations, terminated | truncated

    def close(self) -> None:
        self.envs.close()


def _puffer_env(env_fn: Callable[[], Any], buf: Any = None, seed: int = 0) -> Any:
    import pufferlib.emulation

    return pufferlib.emulation.GymnasiumPufferEnv(env_creator=env_fn, buf=buf)


class DIEngine:
    """DI-engine's SyncSubprocessEnvManager."""

    name, package, deadline = "DI-engine SyncSubprocessEnvManager", "DI-engine", "step_timeout"

    def __init__(self, env_fns: Sequence[Any], seconds: float | None) -> None:
        from ding.envs import SyncSubprocessEnvManager

        config = SyncSubprocessEnvManager.default_config()
        config.update({"shared_memory": False, "episode_num": float("inf"), "context": "fork"})
        config["step_timeout"] = seconds
        self.envs = SyncSubprocessEnvManager([partial(_ding_env, env_fn) for env_fn in env_fns], config)
        self.envs.seed(0, dynamic_seed=False)

    def reset(self) -> Any:
        self.envs.launch()
        ready = self.envs.ready_obs
        return np.stack([ready[index] for index in range(NUM_ENVS)])

    def step(self, action: int) -> Any:
        steps = self.envs.step(dict.fromkeys(range(NUM_ENVS), np.int64(action)))
        rows = [steps[index] for index in range(NUM_ENVS)]
        return np.stack([row.obs for row in rows]), np.array([bool(row.done) for row in rows])

    def close(self) -> None:
        self.envs.close()


def _ding_env(env_fn: Callable[[], Any]) -> Any:
    from ding.envs import BaseEnv, BaseEnvTimestep

    class Ding(BaseEnv):  # type: ignore[misc]
        """The four values that DI-engine wants, of a gymnasium env."""

        def __init__(self) -> None:
            self.inner, self._seed = env_fn(), 0
            self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space
            self.reward_space = gymnasium.spaces.Box(0, 1, (1,))

        def seed(self, seed: int, dynamic_seed: bool = True) -> None:
            self._seed = seed

        def reset(self) -> Any:
            return self.inner.reset(seed=self._seed)[0]

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = self.inner.step(action)
            return BaseEnvTimestep(observation, np.array([reward], np.float32), terminated or truncated, info)

        def close(self) -> None:
            self.inner.close()

        def __repr__(self) -> str:
            return "Ding"

    return Ding()


PEERS: list[Any] = [Multienv, Gymnasium, StableBaselines3, Tianshou, TorchRL, PufferLib, DIEngine]


# --- the program in a process of its own ----------------------------------------------------------


def tell(**what: Any) -> None:
    """Write a line for the process that prints the table."""
    os.write(OUT, (json.dumps(what) + "\n").encode())


OUT = 1


def attempt(stage: str, call: Callable[[], Any], **more: Any) -> Any:
    """Call it; tell that it begins, and what came of it."""
    tell(begin=stage, **more)
    try:
        outcome = call()
    except (Exception, KeyboardInterrupt) as error:
        text = "".join(traceback.format_exception(error))
        results = getattr(error, "results", None)
        delivered = results is not None and all(
            result is not None for index, result in enumerate(results) if index != FAULTY
        )
        message = next(iter(str(error).splitlines()), "")[:120]
        tell(
            failed=stage,
            error=type(error).__name__,
            message=message,
            told="told to raise" in text,
            delivered=delivered,
        )
        return None
    tell(done=stage)
    return outcome


def program(peer: Any, case: Case, folder: str) -> None:
    """Reset, step six times, close; whatever happens, the next is tried."""
    env_fns: list[Any] = [partial(FaultyEnv, horizon=1000)] * NUM_ENVS
    once = str(Path(folder, "struck"))
    env_fns[FAULTY] = partial(case.env, fault=case.fault, at=AT, once=once, horizon=1000)
    envs = peer(env_fns, DEADLINE if case.deadline else None)
    attempt("reset", envs.reset)
    failures = 0
    for step in range(1, STEPS + 1):
        if failures == 2:
            break
        outcome = attempt(f"step {step}", partial(envs.step, step % 4), step=step)
        if outcome is None:
            failures += 1
            if case.deadline:
                time.sleep(LATE)  # what was late is there by now
            continue
        tell(seen=step, observations=np.asarray(outcome[0], float).tolist(), ended=np.asarray(outcome[1]).tolist())
    attempt("close", envs.close)


# --- the process that looks on --------------------------------------------------------------------


@dataclass
class Seen:
    """What one program told."""

    steps: dict[int, Any] = field(default_factory=dict)  # observations
    ended: dict[int, list[bool]] = field(default_factory=dict)
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)
    waits: str = ""  # the call that has not returned
    orphans: int = 0
    log: str = ""


def marked(mark: str) -> list[int]:
    """Return the processes that carry this mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes() and "Z" not in (entry / "stat").read_text().split(
                    ")"
                )[-1].split()[0]:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def watch(python: str, peer: Any, name: str, limit: float) -> Seen:
    """Run one program; kill it when a call takes too long, or where the case says so."""
    case, mark, seen = CASES[name], uuid.uuid4().hex, Seen()
    limit = case.limit or limit
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
        command = [python, __file__, "--program", peer.__name__, name, folder]
        here = {**os.environ, MARK: mark, "PYTHONWARNINGS": "ignore", "WANDB_MODE": "disabled"}
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=here, start_new_session=True)
        lines: SimpleQueue[bytes] = SimpleQueue()
        assert trainer.stdout is not None
        pump = threading.Thread(target=_pump, args=(trainer.stdout, lines), daemon=True)
        pump.start()
        stage, due = "start", time.monotonic() + 120.0
        while True:
            try:
                told = json.loads(lines.get(timeout=0.2))
            except Empty:
                if trainer.poll() is not None:  # the line may stay open: forked workers hold it too
                    break
                if time.monotonic() > due:
                    seen.waits = stage
                    break
                continue
            due = time.monotonic() + limit
            stage = told.get("begin") or stage
            if "failed" in told:
                seen.failed[told["failed"]] = told
            if "seen" in told:
                seen.steps[told["seen"]], seen.ended[told["seen"]] = told["observations"], told["ended"]
            if told.get("done") == "close" or told.get("failed") == "close":
                stage = "exit"
            if told.get("step") == AT and name in ("orphans", "ctrl_c"):
                time.sleep(1.5)
                if name == "orphans":
                    trainer.kill()
                else:
                    os.killpg(trainer.pid, signal.SIGINT)
        if not seen.waits:
            until = time.monotonic() + 5
            while marked(mark) and time.monotonic() < until:
                time.sleep(0.1)
            seen.orphans = len(marked(mark))
        trainer.kill()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        trainer.wait()
        log.seek(0)
        seen.log = log.read()
    return seen


def _pump(stream: Any, lines: SimpleQueue[bytes]) -> None:
    for line in stream:
        if line.startswith(b"{"):  # what a library prints is not ours
            lines.put(line)


def went_on(seen: Seen, calm: Seen, step: int) -> str:
    """Say what the steps from this one on are, beside those of the undisturbed run."""
    for at in range(step, STEPS + 1):
        if at not in seen.steps:
            break
        rows, honest = np.array(seen.steps[at]), np.array(calm.steps[at])
        if seen.ended[at][FAULTY]:
            return "the episode is truncated"
        if np.array_equal(rows, honest):
            continue
        if (rows[:, 3] != honest[:, 3]).any() and (rows[:, 0] > 0).all():
            return "**the old step's answer is taken for the new one's**"
        if rows[FAULTY, 0] == 0 or rows[FAULTY, 1] != honest[FAULTY, 1]:
            others = np.delete(np.arange(NUM_ENVS), FAULTY)
            same = np.array_equal(rows[others], honest[others])
            return "a new episode" + ("" if same else ", the others differ")
        return f"env {FAULTY} is {int(honest[FAULTY, 0] - rows[FAULTY, 0])} step behind"
    return "the same episode goes on, verified"


def cell(name: str, seen: Seen, calm: Seen, has_deadline: bool) -> str:
    """Put what was seen into a few words."""
    case, parts = CASES[name], []
    if not set(range(1, AT)) <= set(seen.steps):
        return f"not tried: {seen.log.strip().splitlines()[-1][:80] if seen.log.strip() else seen.waits}"
    if name == "orphans":
        return "nothing is left" if not seen.orphans else f"orphans: {seen.orphans}"
    failures = [stage for stage in seen.failed if stage.startswith("step")]
    if case.deadline and not has_deadline and name == "late":
        return "has no deadline"
    if failures:
        first = seen.failed[failures[0]]
        kind, _, inner = first["error"].partition("[")
        words = f"`{kind}`, caught as `{inner.rstrip(']').rpartition('[')[2]}` too," if inner else f"`{kind}`"
        if name == "raise":
            words += " with the env's message" if first["told"] else ", the env's message is lost"
            words += ", the others' results are delivered" if first["delivered"] else ", the others' results are lost"
        parts.append(words)
        following = int(failures[0].split()[1]) + 1
        if len(failures) > 1:
            second = seen.failed[failures[1]]
            parts.append(f"the next step: `{second['error']}`")
        elif following in seen.steps:
            if name == "ctrl_c":
                parts = [went_on_shifted(seen, calm, following)]
            else:
                parts.append(f"the next step: {went_on(seen, calm, following)}")
    elif not seen.waits.startswith("step"):
        parts.append(went_on(seen, calm, AT))
    if seen.waits.startswith("step"):
        again = "the next step waits for ever" if failures else "waits for ever"
        if name == "silent":
            again = "waits; after 60 s its stack is in the log" if "Deadlines(step" in seen.log else "waits, in silence"
        parts.append(again)
    elif seen.waits:
        parts.append(f"{'`close()`' if seen.waits == 'close' else 'the exit of the trainer'} waits for ever")
    if "close" in seen.failed:
        parts.append(f"`close()`: `{seen.failed['close']['error']}`")
    if seen.orphans:
        parts.append(f"orphans: {seen.orphans}")
    return "; ".join(parts)


def went_on_shifted(seen: Seen, calm: Seen, step: int) -> str:
    """Say what came after Ctrl-C: the interrupted step's outcome is expected now, the next one's later."""
    rows, honest = np.array(seen.steps[step]), np.array(calm.steps[step - 1])
    if np.array_equal(rows, honest):
        return "the next step returns what the interrupted one would have returned, verified"
    return went_on(seen, calm, step)


# --- the table ------------------------------------------------------------------------------------


def pythons_of(peers: Sequence[Any], pythons: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return for each peer that is installed somewhere the interpreter and the version."""
    found = {}
    for peer in peers:
        for python in pythons:
            code = f"from importlib.metadata import version; print(version({peer.package!r}))"
            if peer is Multienv:
                code = "import multienv; print(multienv.__version__)"
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found[peer.__name__] = (python, done.stdout.strip())
                break
    return found


def markdown(rows: dict[str, dict[str, str]], names: Sequence[str]) -> str:
    """Return the table, a fault in each row."""
    lines = ["| " + " | ".join(["", *rows]) + " |", "|---" * (len(rows) + 1) + "|"]
    for name in names:
        cells = [each.get(name, "") for each in rows.values()]
        lines.append("| " + " | ".join([CASES[name].title, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run all programs and print the table."""
    parser = argparse.ArgumentParser(description="What happens when a worker dies, hangs or raises, as a table.")
    parser.add_argument("--only", default="", help="peers, separated by commas: the beginnings of their names")
    parser.add_argument("--cases", default="", help="faults, separated by commas: " + ", ".join(list(CASES)[1:]))
    parser.add_argument("--python", action="append", default=[], help="another interpreter, with other peers")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds after which a call waits for ever")
    parser.add_argument("--jobs", type=int, default=3, help="programs at a time")
    parser.add_argument("--json", type=Path, help="keep the table there")
    parser.add_argument("--program", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        global OUT  # noqa: PLW0603 - what a library prints must not come between
        OUT = os.dup(1)
        os.dup2(2, 1)
        os.set_inheritable(OUT, False)
        peer = next(peer for peer in PEERS if peer.__name__ == options.program[0])
        program(peer, CASES[options.program[1]], options.program[2])
        return
    only = [part.lower() for part in options.only.split(",") if part]
    peers = [peer for peer in PEERS if not only or any(peer.name.lower().startswith(part) for part in only)]
    names = [name for name in CASES if name != "calm" and (not options.cases or name in options.cases.split(","))]
    installed = pythons_of(peers, [sys.executable, *options.python])
    peers = [peer for peer in peers if peer.__name__ in installed]

    def run(peer: Any, name: str) -> Seen:
        seen = watch(installed[peer.__name__][0], peer, name, options.limit)
        print(".", end="", file=sys.stderr, flush=True)
        return seen

    rows: dict[str, dict[str, str]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = {(peer, name): pool.submit(run, peer, name) for peer in peers for name in ["calm", *names]}
        for peer in peers:
            calm = futures[peer, "calm"].result()
            title = f"{peer.name} {installed[peer.__name__][1]}"
            if len(calm.steps) < STEPS:
                last = (calm.log.strip().splitlines() or ["it waits"])[-1]
                print(f"\n{title}: not tried, it does not run undisturbed: {last}", file=sys.stderr)
                continue
            rows[title] = {
                name: cell(name, futures[peer, name].result(), calm, peer.deadline is not None) for name in names
            }
    print("\n", file=sys.stderr)
    print(f"gymnasium {version('gymnasium')}, Python {sys.version.split()[0]}, Linux {os.uname().release}\n")
    print(markdown(rows, names))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
