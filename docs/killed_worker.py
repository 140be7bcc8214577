"""Kill the worker of an env in the middle of an episode, twice, and draw what follows as ``docs/killed_worker.svg``.

    python docs/killed_worker.py

A car drives up a hill in multienv and in gymnasium's ``AsyncVectorEnv``, with the same seed and the same policy. Both
workers get the same signals. The curves are the positions of the car that ``step()`` returned.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import gymnasium
import numpy as np

from multienv import SubprocessVectorEnv

KILLS = {28: signal.SIGKILL, 70: signal.SIGSEGV}  # after so many steps of the episode
SECONDS = 10  # of the animation, the last two of which stand still; it begins with these, and then from the start
REPEATS = f'begin="-{0.8 * SECONDS:g}s" dur="{SECONDS}s" repeatCount="indefinite"'
WIDTH, TOP, HEIGHT, GAP = 640, 66, 110, 56
LEFT = 20


class Drive(NamedTuple):
    """What became of an episode: the positions of the car, and the signals or the error at certain steps."""

    positions: list[float]
    events: dict[int, str]
    end: str


def drive(envs: Any, kill: bool) -> Drive:
    """Drive the car for one episode; kill the worker on the way."""
    observations, _ = envs.reset(seed=1)
    positions, events = [float(observations[0, 0])], {}
    terminated = False
    while not terminated:
        step = len(positions) - 1
        if kill and step in KILLS:
            os.kill(pid_of(envs), KILLS[step])
            events[step] = KILLS[step].name
        try:
            # Push the car in the direction in which it rolls.
            observations, _, terminations, truncations, infos = envs.step(np.where(observations[:, 1] < 0, 0, 2))
        except (EOFError, OSError) as error:
            return Drive(positions, events, type(error).__name__)
        assert not truncations[0], infos
        positions.append(float(observations[0, 0]))
        terminated = bool(terminations[0])
    return Drive(positions, events, "the top of the hill")


def pid_of(envs: Any) -> int:
    """Return the process id of the only worker."""
    if isinstance(envs, SubprocessVectorEnv):
        pid = envs.statistics()[0].pid
        assert pid is not None
        return pid
    return int(envs.processes[0].pid)


def measured() -> tuple[Drive, Drive, list[float]]:
    """Drive with multienv and with gymnasium; return both drives, and the seconds that each recovery took."""
    env_fns = [lambda: gymnasium.make("MountainCar-v0")]
    undisturbed = drive(gymnasium.vector.SyncVectorEnv(env_fns), kill=False)
    with SubprocessVectorEnv(env_fns, reports="") as envs:
        ours = drive(envs, kill=True)
        seconds = list(envs.statistics()[0].recovery_seconds)
    assert ours.positions == undisturbed.positions, "multienv differs from the undisturbed run"
    peer = gymnasium.vector.AsyncVectorEnv(env_fns, context="forkserver")
    theirs = drive(peer, kill=True)
    peer.closed = True  # its close() would wait for ever
    return ours, theirs, seconds


def curve(drive: Drive, top: float, steps: int) -> str:
    """Return the polyline of a drive, in a box of ``HEIGHT`` below ``top``."""
    points = (
        f"{LEFT + WIDTH * step / steps:.1f},{top + HEIGHT * (0.55 - position) / 1.75:.1f}"
        for step, position in enumerate(drive.positions)
    )
    return f'<polyline points="{" ".join(points)}" fill="none" stroke-width="2.5" stroke-linejoin="round"'


def appears(step: int, steps: int) -> str:
    """Return an animation that shows what it stands in from this step on."""
    moment = max(0.001, 0.8 * step / steps)
    return (
        f'<animate attributeName="opacity" values="0;1;1" keyTimes="0;{moment:.3f};1" calcMode="discrete" {REPEATS}/>'
    )


def text(x: float, y: float, line: str, inside: str = "", style: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(line)}{inside}</text>'


def row(drive: Drive, top: float, steps: int, title: str, colour: str, told: list[str]) -> list[str]:
    """Return the parts of one drive: title, axis, curve, a mark at each signal with the text beside it, and the end."""
    middle = top + HEIGHT / 2
    upwards = f'font-size="11" fill="#57606a" text-anchor="middle" transform="rotate(-90 {LEFT - 6} {middle})"'
    parts = [
        text(LEFT, top - 12, title, style='font-size="15" font-weight="bold"'),
        text(LEFT - 6, middle, "position of the car", style=upwards),
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff" stroke="#d0d7de"/>',
        f'<g clip-path="url(#shown)">{curve(drive, top, steps)} stroke="{colour}"/></g>',
    ]
    for (step, name), what in zip(drive.events.items(), told, strict=True):
        x, shown = LEFT + WIDTH * step / steps, appears(step, steps)
        line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + HEIGHT}"'
        parts += [
            f'<g><line {line} stroke="#cf222e" stroke-width="1.5" stroke-dasharray="4 3"/>{shown}',
            text(x + 6, top + 16, f"⚡ {name}", style='fill="#cf222e" font-weight="bold"'),
            text(x + 6, top + 34, what, style='fill="#57606a"') + "</g>",
        ]
    last = len(drive.positions) - 1
    shown = appears(last, steps)
    if last == steps:
        parts.append(text(LEFT + WIDTH + 10, top + 16, drive.end, shown, f'fill="{colour}" font-weight="bold"'))
    else:
        parts.append(text(LEFT + WIDTH * last / steps + 6, top + 34, drive.end, shown, 'fill="#57606a"'))
    return parts


def drawing() -> str:
    """Kill the workers, and return the SVG."""
    ours, theirs, seconds = measured()
    steps = len(ours.positions) - 1
    below = TOP + HEIGHT + GAP
    height = below + HEIGHT + 34
    reveal = f'<animate attributeName="width" values="0;{WIDTH};{WIDTH}" keyTimes="0;0.8;1" {REPEATS}/>'
    back = [f"goes on after {1000 * one:.0f} ms" for one in seconds]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {height}" width="820" height="{height}"',
        '  font-family="sans-serif" font-size="13" fill="#24292f">',
        f'<clipPath id="shown"><rect x="{LEFT}" y="0" width="{WIDTH}" height="{height}">{reveal}</rect></clipPath>',
        f'<rect width="820" height="{height}" rx="8" fill="#f6f8fa"/>',
        text(
            LEFT,
            26,
            f"MountainCar-v0, one episode: the worker is killed at steps {' and '.join(map(str, KILLS))}",
            style='font-size="16"',
        ),
        *row(ours, TOP, steps, "multienv", "#0969da", back),
        *row(theirs, below, steps, "gymnasium's AsyncVectorEnv", "#8250df", [""]),
        text(LEFT + WIDTH, height - 12, f"step {steps}", style='text-anchor="end" fill="#57606a"'),
        text(LEFT, height - 12, "step 0", style='fill="#57606a"'),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "killed_worker.svg"
    file.write_text(drawing())
