"""What happens when a worker dies, hangs or raises: multienv and its peers, in a table, and one for each fault.

    python benchmarks/fault_table.py                          # all that are installed
    python benchmarks/fault_table.py --only multienv,gymnasium --json faults.json
    python benchmarks/fault_table.py --python ../venv-of-peers/bin/python   # and what is installed there

Each cell is a program of its own: four envs, six steps, the fault in env 1 at step 3, once. A call that has not
returned after ``--limit`` seconds "waits for ever". All processes that a program has started carry a mark in their
environment; those that are alive five seconds after its end are orphans. ``docs/comparison.md`` has the output. It
takes a quarter of an hour, most of it waiting. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from fault_peers import NUM_ENVS, PEERS, Multienv, Peer

from multienv.testing import FaultyEnv

STEPS, FAULTY, AT = 6, 1, 3
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


# --- the program in a process of its own ----------------------------------------------------------


def attempt(told: Path, stage: str, call: Callable[[], Any]) -> Any:
    """Call it; write that it begins, and what came of it, for the process that prints the table."""

    def tell(**what: Any) -> None:
        with told.open("a") as file:  # not a pipe: forked workers would hold it, and envs write to it
            file.write(json.dumps(what) + "\n")

    tell(begin=stage)
    try:
        outcome = call()
    except (Exception, KeyboardInterrupt) as error:
        results = getattr(error, "results", None) or [None] * NUM_ENVS
        tell(
            failed=stage,
            error=type(error).__name__,
            has_message="told to raise" in "".join(traceback.format_exception(error)),
            is_delivered=all(result is not None for index, result in enumerate(results) if index != FAULTY),
        )
        return None
    if stage.startswith("step"):
        observations, ended = outcome
        tell(done=stage, observations=np.asarray(observations, float).tolist(), ended=np.asarray(ended).tolist())
    else:
        tell(done=stage)
    return outcome


def program(peer: type[Peer], case: Case, folder: Path) -> None:
    """Reset, step six times, close; after a failure the next step and the close are tried."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for a job in the background
    env_fns: list[Any] = [partial(FaultyEnv, horizon=1000)] * NUM_ENVS
    env_fns[FAULTY] = partial(case.env, fault=case.fault, at=AT, once=str(folder / "struck"), horizon=1000)
    envs = peer(env_fns, DEADLINE if case.deadline else None)
    told = folder / "told"
    attempt(told, "reset", envs.reset)
    failures = 0
    for step in range(1, STEPS + 1):
        if attempt(told, f"step {step}", partial(envs.step, step % 4)) is None:
            failures += 1
            if failures == 2:
                break
            if case.deadline:
                time.sleep(LATE)  # what was late is there by now
    attempt(told, "close", envs.close)


# --- the process that looks on --------------------------------------------------------------------


@dataclass
class Seen:
    """What one program told."""

    steps: dict[int, Any] = field(default_factory=dict)  # observations
    ended: dict[int, list[bool]] = field(default_factory=dict)
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)
    stage: str = "start"  # the call that it was last in; "exit" after the last one
    waits: str = ""  # the call that has not returned
    orphans: int = 0
    log: str = ""

    def take(self, told: dict[str, Any]) -> None:
        """Take in one line."""
        self.stage = told.get("begin") or self.stage
        if "failed" in told:
            self.failed[told["failed"]] = told
        if "observations" in told:
            step = int(self.stage.split()[1])
            self.steps[step], self.ended[step] = told["observations"], told["ended"]
        if self.stage == "close" and "begin" not in told:
            self.stage = "exit"


def marked(mark: str) -> list[int]:
    """Return the processes that carry this mark and are no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not is_zombie and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def watch(python: str, peer: type[Peer], name: str, limit: float) -> Seen:
    """Run one program to its end, or until a call takes too long."""
    mark, seen = uuid.uuid4().hex, Seen()
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
        command = [python, __file__, "--program", peer.__name__, name, folder]
        here = {**os.environ, MARK: mark, "PYTHONWARNINGS": "ignore", "WANDB_MODE": "disabled"}
        trainer = subprocess.Popen(command, stdout=log, stderr=log, env=here, start_new_session=True)
        follow(trainer, Path(folder, "told"), seen, name, CASES[name].limit or limit)
        if not seen.waits:
            until = time.monotonic() + 5
            while marked(mark) and time.monotonic() < until:
                time.sleep(0.1)
            seen.orphans = len(marked(mark))
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        trainer.wait()
        log.seek(0)
        seen.log = log.read()
    return seen


def follow(trainer: subprocess.Popen[bytes], told: Path, seen: Seen, name: str, limit: float) -> None:
    """Read what the program tells until it has ended or is stuck; strike it where the case says so."""
    read, struck, due = 0, False, time.monotonic() + 120.0
    while True:
        has_ended = trainer.poll() is not None  # asked first: what it told before is read below
        lines = told.read_text().splitlines() if told.exists() else []
        for line in lines[read:]:
            seen.take(json.loads(line))
        if len(lines) > read:
            read, due = len(lines), time.monotonic() + limit
        if has_ended:
            return
        if time.monotonic() > due:
            seen.waits = seen.stage
            return
        if not struck and name in ("orphans", "ctrl_c") and seen.stage == f"step {AT}":
            struck = True
            time.sleep(1.5)
            if name == "orphans":
                trainer.kill()
            else:
                os.killpg(trainer.pid, signal.SIGINT)  # as a terminal does
        time.sleep(0.05)


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
    if not set(range(1, AT)) <= set(seen.steps):
        return f"not tried: {(seen.log.strip().splitlines() or [seen.waits])[-1].strip()[:80]}"
    if name == "orphans":
        return f"orphans: {seen.orphans}" if seen.orphans else "nothing is left"
    if name == "late" and not has_deadline:
        return "has no deadline"
    parts = first_failure(name, seen, calm) if f"step {AT}" in seen.failed else []
    if not parts and not seen.waits.startswith("step"):
        parts = [went_on(seen, calm, AT)]
    if name == "silent" and seen.waits.startswith("step"):
        parts.append(
            "waits; after 60 s its stack is in the log" if "Deadlines(step" in seen.log else "waits, in silence"
        )
    elif seen.waits:
        what = {"close": "`close()`", "exit": "the exit of the trainer"}.get(
            seen.waits, "the next step" if parts else ""
        )
        parts.append(f"{what} waits for ever".strip())
    if "close" in seen.failed:
        parts.append(f"`close()`: `{seen.failed['close']['error']}`")
    if seen.orphans:
        parts.append(f"orphans: {seen.orphans}")
    return "; ".join(parts)


def first_failure(name: str, seen: Seen, calm: Seen) -> list[str]:
    """Say what the step with the fault raised, and what the next one did."""
    first, following = seen.failed[f"step {AT}"], AT + 1
    kind, _, inner = first["error"].partition("[")
    words = f"`{kind}`, caught as `{inner.rstrip(']').rpartition('[')[2]}` too" if inner else f"`{kind}`"
    if name == "raise":
        words += ", with the env's message" if first["has_message"] else ", the env's message is lost"
        words += ", the others' results are delivered" if first["is_delivered"] else ", the others' results are lost"
    if f"step {following}" in seen.failed:
        return [words, f"the next step: `{seen.failed[f'step {following}']['error']}`"]
    if following not in seen.steps:
        return [words]
    if name == "ctrl_c" and np.array_equal(seen.steps[following], calm.steps[AT]):
        return ["the next step returns what the interrupted one would have returned, verified"]
    return [words, f"the next step: {went_on(seen, calm, following)}"]


# --- the table ------------------------------------------------------------------------------------


def pythons_of(peers: Sequence[type[Peer]], pythons: Sequence[str]) -> dict[str, tuple[str, str]]:
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


def verdict(text: str) -> str:
    """Put a cell into a word or two."""
    if text.startswith(("the same episode", "the next step returns")):
        return "goes on"
    if "old step's answer" in text:
        return "**wrong answer**"
    if not text.startswith("`"):
        return text
    if "waits for ever" in text:
        return "error, then hangs"
    return "error, then a new episode" if "the next step: a new episode" in text else "error"


def says_more(text: str) -> bool:
    """Tell whether a cell says more than its verdict."""
    return verdict(text) not in ("goes on", text)


def markdown(rows: dict[str, dict[str, str]], names: Sequence[str]) -> str:
    """Return a table of all faults in a word or two; then, for each fault, a table of the cells that say more."""
    titles = {name: CASES[name].title[0].upper() + CASES[name].title[1:] for name in names}
    verdicts = {name: [verdict(cells[name]) for cells in rows.values()] for name in names}
    lines = [f"| | {' | '.join(rows)} |", "|---" * (len(rows) + 1) + "|"]
    lines += [f"| {titles[name]} | {' | '.join(verdicts[name])} |" for name in names]
    details: dict[str, list[str]] = {}  # the titles of faults, by what they have in common
    for name in names:
        said = [f"| {peer} | {cells[name]} |" for peer, cells in rows.items() if says_more(cells[name])]
        if said:
            details.setdefault("\n".join(said), []).append(titles[name])
    for table, same in details.items():
        lines += ["", f"### {'. '.join(same)}", "", "| | |", "|---|---|", table]
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
        kind, case, folder = options.program
        program(next(peer for peer in PEERS if peer.__name__ == kind), CASES[case], Path(folder))
        return
    only = [part.lower() for part in options.only.split(",") if part]
    peers = [peer for peer in PEERS if not only or any(peer.name.lower().startswith(part) for part in only)]
    names = [name for name in CASES if name != "calm" and (not options.cases or name in options.cases.split(","))]
    installed = pythons_of(peers, [sys.executable, *options.python])
    peers = [peer for peer in peers if peer.__name__ in installed]

    def run(peer: type[Peer], name: str) -> Seen:
        seen = watch(installed[peer.__name__][0], peer, name, options.limit)
        print(".", end="", file=sys.stderr, flush=True)
        return seen

    rows: dict[str, dict[str, str]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = {(peer, name): pool.submit(run, peer, name) for peer in peers for name in ["calm", *names]}
        if not peers:
            sys.exit("None of these is installed; with --python name an interpreter that has it.")
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
    release = ".".join(os.uname().release.split(".")[:2])
    print(f"Python {sys.version.split()[0]}, gymnasium {version('gymnasium')}, Linux {release}.\n")
    print(markdown(rows, names))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
