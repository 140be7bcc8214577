"""What one driver can do on Ray: calls a second, bytes a second, and what a call costs the driver's processor.

Plain actors on a local Ray that is started for it and shut down again; last a few rounds of multienv's RayVectorEnv,
for what its own work costs beside Ray's. All rows of a table take
short turns, in an order that is drawn anew each time; medians are shown, and the range beside them. The actors here
share the cores and the memory with the driver. On a cluster they do not, but a network lies between. So read the
column "driver": processor time of all threads of the driver for one call. No machine can make it do more calls a
second than one divided by that, times the cores that its threads can use, which is less than two.

``--json`` keeps the figures; ``capacity_model.py`` computes with them. ``--plot`` draws its picture.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from capacity_model import Measured, plot
from rich.console import Console
from rich.table import Table
from scaling import BusyEnv

import multienv

try:
    import ray
except ImportError as error:
    sys.exit(f'{error}; from a checkout: pip install -e ".[ray,bench]"')

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
# Ray sends a result of up to 100 kB with the reply, a longer one through the object store. Its limit is one of a
# cluster; set here so that each size is seen both ways. Tried without gain, because a cluster of others keeps its
# limit: a long result as many short ones (num_returns): 1 MB as fast, 10 MB seven times slower than through the store.
LIMITS: dict[str, int | None] = {"as Ray does": None, "inline": 2**26, "store": 0}
Sample = tuple[float, float, float]  # calls a second; seconds of the driver's processor a call: all threads, the caller
Bench = Callable[[float], Sample]


class Echo:
    """Answers with what it is given, or with zeros."""

    def __init__(self) -> None:
        """Lay out what it answers, once: to make it is no part of what is measured."""
        self._arrays = {size: np.zeros(size, np.uint8) for size in SIZES}

    def echo(self, data: bytes) -> bytes:
        return data

    def receive(self, data: bytes) -> int:
        return len(data)

    def array(self, size: int) -> Any:
        return self._arrays[size]


@contextlib.contextmanager
def local_ray(limit: int | None = None) -> Iterator[Any]:
    """Start a Ray of our own, never somebody else's; yield the class of actors; shut it down."""
    config = {} if limit is None else {"max_direct_call_object_size": limit, "task_rpc_inlined_bytes_limit": 2**28}
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2**29,
        _system_config=config,
    )
    try:
        yield ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(Echo)
    finally:
        ray.shutdown()


def counted(go: Callable[[], object], calls: int) -> Bench:
    """Do it again and again; each time it makes so many calls."""

    def bench(seconds: float) -> Sample:
        done, begin = 0, time.perf_counter()
        everything, caller = time.process_time(), time.thread_time()
        while (spent := time.perf_counter() - begin) < seconds:
            go()
            done += calls
        return done / spent, (time.process_time() - everything) / done, (time.thread_time() - caller) / done

    return bench


def by_get(actors: Sequence[Any], in_flight: int, data: bytes) -> Bench:
    """Rounds: a call to each actor, so many rounds under way; ``ray.get`` of the oldest."""
    rounds: deque[list[Any]] = deque()

    def go() -> None:
        rounds.append([actor.echo.remote(data) for actor in actors])
        if len(rounds) == in_flight:
            ray.get(rounds.popleft())

    return counted(go, len(actors))


def by_future(actors: Sequence[Any], in_flight: int, data: bytes) -> Bench:
    """Do the same, each actor by itself: a callback, in a thread of Ray's, says that its next call can be made."""
    answered: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def call(actor: Any) -> None:
        actor.echo.remote(data).future().add_done_callback(lambda future: answered.put((actor, future.result())))

    def go() -> None:
        if free:
            call(free.pop())
        else:
            call(answered.get()[0])

    free = list(actors) * in_flight
    return counted(go, 1)


def in_turns(benches: Mapping[Any, Bench], seconds: float, repeats: int) -> dict[Any, list[Sample]]:
    """Samples of all benches, in turns, in an order drawn for each; each is warmed up first."""
    samples: dict[Any, list[Sample]] = {name: [] for name in benches}
    order, dice = list(benches), random.Random(0)
    for bench in benches.values():
        bench(seconds / 2)
    for _ in range(repeats):
        dice.shuffle(order)
        for name in order:
            samples[name].append(benches[name](seconds))
    return samples


def row(key: dict[str, Any], samples: list[Sample]) -> dict[str, Any]:
    """Return the medians, and the range of the first."""
    rates, everything, caller = zip(*samples, strict=True)
    return key | {
        "calls": statistics.median(rates),
        "least": min(rates),
        "most": max(rates),
        "driver": statistics.median(everything),
        "caller": statistics.median(caller),
    }


# --- the tables -----------------------------------------------------------------------------------


def calls(actor: Any, seconds: float, repeats: int) -> list[dict[str, Any]]:
    """Calls of 100 bytes, 100 bytes back; by actors, rounds under way, threads of the actor, and how it is waited."""
    actors = {1: [actor.remote() for _ in range(4)], 4: [actor.options(max_concurrency=4).remote() for _ in range(4)]}
    ways = {"get": by_get, "future": by_future}
    benches = {
        key: ways[key[3]](actors[key[2]][: key[0]], key[1], bytes(100))
        for key in itertools.product((1, 2, 4), (1, 2), actors, ways)
    }
    names = "actors", "in_flight", "threads", "by"
    found = in_turns(benches, seconds, repeats)
    return [row(dict(zip(names, key, strict=True)), samples) for key, samples in found.items()]


def requests(actor: Any, seconds: float, repeats: int) -> list[dict[str, Any]]:
    """Synchronous calls by the size of what is sent; the answer is small."""
    one = actor.remote()

    def send(data: bytes) -> None:
        ray.get(one.receive.remote(data))

    benches = {size: counted(partial(send, bytes(size)), 1) for size in (100, 1_000, *SIZES)}
    return [row({"bytes": size}, samples) for size, samples in in_turns(benches, seconds, repeats).items()]


def replies(seconds: float, repeats: int) -> list[dict[str, Any]]:
    """Arrays from one actor: a call at a time, the same with a copy out of Ray's buffer, and two under way with it."""
    found: dict[Any, list[Sample]] = {}
    into = np.empty(max(SIZES), np.uint8)

    def fetch(make: Callable[[], Any], pending: deque[Any], in_flight: int, copy: str) -> None:
        pending.append(make())
        if len(pending) == in_flight:
            reply = ray.get(pending.popleft())
            if copy == "yes":
                into[: len(reply)] = reply

    # A session has one limit. The sessions take turns as the rows within one do: twice each.
    for way, limit in 2 * list(LIMITS.items()):
        with local_ray(limit) as actor:
            one = actor.remote()
            benches = {
                (way, size, *how): counted(partial(fetch, partial(one.array.remote, size), deque(), *how), 1)
                for size, how in itertools.product(SIZES, ((1, "no"), (1, "yes"), (2, "yes")))
            }
            for key, samples in in_turns(benches, seconds, repeats).items():
                found.setdefault(key, []).extend(samples)
    names = "way", "bytes", "in_flight", "copied"
    return [row(dict(zip(names, key, strict=True)), samples) for key, samples in sorted(found.items())]


def rounds(seconds: float, repeats: int) -> list[dict[str, Any]]:
    """Rounds of a RayVectorEnv on one host with envs that do nothing, by workers and by steps of a fragment."""
    if not hasattr(multienv, "RayVectorEnv"):
        print("skipped: RayVectorEnv is not in this multienv", file=sys.stderr)
        return []
    options, benches = multienv.RayOptions(hosts=1, cpus_per_host=1), {}
    with contextlib.ExitStack() as stack:
        for workers in (1, 8):
            fns = [partial(BusyEnv, 0.0, 16)] * workers
            envs = stack.enter_context(multienv.RayVectorEnv(fns, ray=options, envs_per_worker=1))
            envs.reset()
            benches[workers, 1] = counted(partial(envs.step, np.zeros(workers, np.int64)), 1)
            if hasattr(envs, "rollout"):
                for steps in (100, 1_000):
                    benches[workers, steps] = counted(partial(envs.rollout, stand_still, steps), 1)
        found = in_turns(benches, seconds, repeats)
    return [row({"workers": key[0], "steps": key[1]}, samples) for key, samples in found.items()]


def stand_still(observations: Any) -> Any:
    """Return the same action for each env: a policy that costs nothing."""
    return np.zeros(len(observations), np.int64)


def own(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What multienv's own work costs for each worker's answer, in the driver and on the host, and for each step."""
    at = {(each["workers"], each["steps"]): each for each in rows}
    if not at:
        return {}
    one, eight = at[1, 1], at[8, 1]
    answer = (eight["driver"] - one["driver"]) / 7
    # The envs' processes share the cores with the relay here: an upper bound.
    found = {"answer": answer, "relay": (1 / eight["calls"] - 1 / one["calls"]) / 7 - answer}
    if (8, 1_000) in at:
        found["record"] = (at[8, 1_000]["driver"] - at[8, 100]["driver"]) / (8 * 900)
    return {name: max(0.0, value) for name, value in found.items()}


def measured(figures: Mapping[str, list[dict[str, Any]]]) -> Measured:
    """What the capacity model computes with."""

    def one(table: str, **key: Any) -> dict[str, Any]:
        return next(each for each in figures[table] if key.items() <= each.items())

    reply = one("replies", way="as Ray does", bytes=1_000_000, in_flight=2, copied="yes")
    return Measured(
        calls=statistics.median(each["calls"] for each in figures["calls"] if each["in_flight"] == 2 < each["actors"]),
        bytes=reply["bytes"] * reply["calls"],
        latency=1 / one("calls", actors=1, in_flight=1, threads=4, by="get")["calls"],
    )._replace(**own(figures["rounds"]))


# --- what is shown --------------------------------------------------------------------------------


def show(title: str, rows: list[dict[str, Any]], keys: Sequence[str], console: Console, is_bytes: bool) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for head in [*keys, "MB/s" if is_bytes else "calls/s", "range, %", "ms a call", "driver, µs", "its caller, µs"]:
        table.add_column(head.replace("_", " "), justify="right", no_wrap=True)
    for each in rows:
        rate, scale = each["calls"], each["bytes"] / 1e6 if is_bytes else 1.0
        cells = [f"{each[key]:,}" if isinstance(each[key], int) else each[key] for key in keys]
        spread = f"{100 * each['least'] / rate - 100:+.0f} {100 * each['most'] / rate - 100:+.0f}"
        driver = [f"{1e6 * each[name]:,.0f}" for name in ("driver", "caller")]
        table.add_row(*cells, f"{scale * rate:,.0f}", spread, f"{1000 / rate:.3f}", *driver)
    console.print(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each turn")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="the picture of capacity_model.py, with these figures")
    arguments = parser.parse_args()
    settings, console = (arguments.seconds, arguments.repeats), Console()
    console.width = max(console.width, 110)  # in a file too no column is cut off
    figures = {}
    with local_ray() as actor:
        figures["calls"] = calls(actor, *settings)
        show("Calls of 100 bytes", figures["calls"], ["actors", "in_flight", "threads", "by"], console, False)
        figures["requests"] = requests(actor, *settings)
        show("Calls one at a time, by what is sent", figures["requests"], ["bytes"], console, False)
        figures["rounds"] = rounds(*settings)
        if figures["rounds"]:
            show(
                "Rounds of a RayVectorEnv, envs that do nothing",
                figures["rounds"],
                ["workers", "steps"],
                console,
                False,
            )
    # Six sessions of twelve rows: shorter turns.
    figures["replies"] = replies(arguments.seconds / 3, max(2, arguments.repeats // 2))
    show("Replies of one actor", figures["replies"], ["way", "bytes", "in_flight", "copied"], console, True)
    found = measured(figures)
    console.print(f"for the model: {found}")
    console.print(
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}: see the range before you trust"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures | {"measured": found._asdict()}, indent=1))
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
