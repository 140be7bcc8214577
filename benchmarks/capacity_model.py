"""How many env cores one driver can feed, by arithmetic; the formulas are those of benchmarks/README.md.

There are N cores with an env each, E of them on a host, so H = N / E hosts, rounded up. A round is one call to each
host; in it each env makes F steps (F = 1: step by step). It takes

::

    host    F·t + L + E·r                           env steps, the way there and back, the relay's own work
    driver  H/C + N·a + N·F·(b/B + s)               calls, answers, bytes and records of the steps
    round   the longer one: the hosts work while the driver unpacks
    rate    N·F / round

with t seconds a step, b bytes a step, C calls and B bytes a second, L seconds for a call there and back, r and a
seconds for each env's answer on its host and in the driver, s seconds for each step in the driver. A core is busy for
F·t / round of the time. Left out: the policy's own time, the learner's, and the slowest env of a round.

Run it for a table; ``--measured`` takes the file that ``ray_capacity.py --json`` has written.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """What one driver can do. The defaults are rounded figures of ``ray_capacity.py`` on two cores that others used.

    Attributes:
        calls: C, calls a second.
        bytes: B, bytes a second.
        latency: L, seconds for a call there and back.
        answer: a, seconds of the driver for each env's answer.
        relay: r, the same of its host; too long, because the envs shared the cores with it.
        record: s, seconds of the driver for each step in an answer; assumed, not measured.
    """

    calls: float = 2_000.0
    bytes: float = 450e6
    latency: float = 0.8e-3
    answer: float = 50e-6
    relay: float = 80e-6
    record: float = 1e-6


class Work(NamedTuple):
    """What the envs do.

    Attributes:
        step: t, seconds of an env's step.
        bytes: b, bytes of a step: observation, reward, flags.
        steps: F, steps a call.
        envs: E, envs of a host, one a core.
    """

    step: float
    bytes: float = 128.0
    steps: int = 1
    envs: int = 64


def host_parts(measured: Measured, work: Work, cores: float) -> dict[str, float]:
    """Seconds of a round on a host, by what they go to."""
    return {"envs": work.steps * work.step, "way": measured.latency + min(work.envs, cores) * measured.relay}


def driver_parts(measured: Measured, work: Work, cores: float) -> dict[str, float]:
    """Seconds of a round in the driver, by what they go to."""
    return {
        "calls": math.ceil(cores / work.envs) / measured.calls,
        "bytes": cores * work.steps * work.bytes / measured.bytes,
        "unpacking": cores * (measured.answer + work.steps * measured.record),
    }


def round_seconds(measured: Measured, work: Work, cores: float) -> float:
    """Seconds of a round."""
    parts = host_parts(measured, work, cores), driver_parts(measured, work, cores)
    return max(sum(each.values()) for each in parts)


def rate(measured: Measured, work: Work, cores: float) -> float:
    """Env steps a second."""
    return cores * work.steps / round_seconds(measured, work, cores)


def busy(measured: Measured, work: Work, cores: float) -> float:
    """Share of the time that the cores step envs: 1.0 is the ideal."""
    return work.steps * work.step / round_seconds(measured, work, cores)


def limit(measured: Measured, work: Work, cores: float) -> str:
    """What takes most of a round: envs, way, calls, bytes or unpacking."""
    parts = host_parts(measured, work, cores), driver_parts(measured, work, cores)
    longer = max(parts, key=lambda each: sum(each.values()))
    return max(longer, key=longer.__getitem__)


def _of_a_core(measured: Measured, work: Work) -> tuple[float, float]:
    """Seconds of the driver for a core and call, and for each step beside."""
    return 1 / (work.envs * measured.calls) + measured.answer, work.bytes / measured.bytes + measured.record


def most_cores(measured: Measured, work: Work) -> float:
    """How many cores one driver keeps up with: N at which both sides of a round take as long."""
    call, step = _of_a_core(measured, work)
    return sum(host_parts(measured, work, work.envs).values()) / (call + work.steps * step)


def steps_needed(measured: Measured, work: Work, cores: float, share: float = 0.9) -> int | None:
    """The shortest fragment with which one driver keeps so many cores busy; ``None``: no length does."""
    way = host_parts(measured, work, work.envs)["way"]
    call, step = _of_a_core(measured, work)
    left = work.step / share - cores * step
    if left <= 0:
        return None
    return math.ceil(max(1.0, share / (1 - share) * way / work.step, cores * call / left))


def drivers_needed(measured: Measured, work: Work, cores: float, share: float = 0.9) -> int | None:
    """How many drivers keep so many cores busy, their hosts dealt out; ``None``: only longer fragments help."""
    parts = host_parts(measured, work, work.envs)
    if parts["envs"] < share * sum(parts.values()):
        return None
    call, step = _of_a_core(measured, work)
    return math.ceil(cores * (call + work.steps * step) * share / parts["envs"])


# --- what is shown --------------------------------------------------------------------------------

COSTS = {"10 µs": 10e-6, "100 µs": 100e-6, "1 ms": 1e-3, "10 ms": 10e-3}


def plot(measured: Measured, path: Path) -> None:
    """Env steps a second by env cores, for each cost of a step."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cores = sorted({round(10 ** (place / 40)) for place in range(161)})
    figure, axes = plt.subplots(figsize=(7.5, 5), layout="constrained")
    for place, (name, step) in enumerate(COSTS.items()):
        colour = plt.get_cmap("viridis")(0.85 - place / 3.6)
        axes.plot(cores, [count / step for count in cores], color=colour, linewidth=0.7, linestyle=":")
        for steps, style in ((1, "--"), (100, "-")):
            work = Work(step, steps=steps)
            rates = [rate(measured, work, count) for count in cores]
            axes.plot(cores, rates, style, color=colour, label=f"{name} a step" if steps > 1 else None)
    for style, name in (("-", "fragments of 100 steps"), ("--", "step by step"), (":", "ideal: each core busy")):
        axes.plot([], [], style, color="grey", label=name)
    axes.set(xscale="log", yscale="log", xlim=(1, cores[-1]), ylim=(50, 1e8))
    axes.set_xlabel("env cores, 64 a host, one driver")
    axes.set_ylabel("env steps a second")
    axes.set_title("What one driver feeds, by the model", fontsize="medium")
    axes.grid(which="major", linewidth=0.3)
    axes.legend(fontsize="small", loc="upper left", ncols=2)
    figure.savefig(path, dpi=100)


def lines(measured: Measured, work: Work, cores: Sequence[int]) -> list[str]:
    """One line for each number of cores."""
    told = []
    for count in cores:
        fragment, drivers = steps_needed(measured, work, count), drivers_needed(measured, work, count)
        told.append(
            f"{work.steps:6} {count:8,} {rate(measured, work, count):13,.0f} {busy(measured, work, count):6.0%}"
            f"  {limit(measured, work, count):10} {fragment or 'no length':>15} {drivers or 'longer fragments':>18}"
        )
    return told


def main() -> None:
    """Print a table for each cost of a step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--measured", type=Path, help="what ray_capacity.py --json has written")
    parser.add_argument("--bytes", type=float, default=128.0, help="of a step")
    parser.add_argument("--envs", type=int, default=64, help="of a host, one a core")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 100, 1_000], help="of a fragment")
    parser.add_argument("--cores", type=int, nargs="+", default=[64, 640, 10_000])
    for name, value in Measured()._asdict().items():
        parser.add_argument(f"--{name}-of-driver" if name == "bytes" else f"--{name}", type=float, help=f"{value:g}")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = json.loads(arguments.measured.read_text())["measured"] if arguments.measured else {}
    given = {"bytes": arguments.bytes_of_driver}
    given |= {name: getattr(arguments, name) for name in ("calls", "latency", "answer", "relay", "record")}
    measured = Measured(**found)._replace(**{name: value for name, value in given.items() if value is not None})
    print(measured)
    for name, step in COSTS.items():
        work = Work(step, arguments.bytes, envs=arguments.envs)
        print(f"\n{name} a step")
        print("     F    cores   env steps/s   busy  limit     F that keeps 90 %   drivers at this F")
        for steps in arguments.steps:
            each = work._replace(steps=steps)
            print("\n".join(lines(measured, each, arguments.cores)))
            print(f"{'':6} one driver keeps up with {most_cores(measured, each):,.0f} cores")
    if arguments.plot:
        plot(measured, arguments.plot)


if __name__ == "__main__":
    main()
