"""Draw the states of a supervised worker from the state machine itself, as ``docs/states.svg``, and print their tables.

    python docs/states.py

The printed tables stand in docs/design.md; a test compares both.
"""

from __future__ import annotations

import ast
import inspect
import sys
from enum import Enum
from pathlib import Path

from multienv._engine.recovery.state_machine import TABLE, Closed, Episode, Process

CENTRES = {
    Process.NONE: (190, 225),
    Process.BUILDING: (400, 60),
    Process.READY: (610, 225),
    Process.LOST: (400, 390),
}
LOOPS = {Process.NONE: (-1, 0), Process.READY: (1, 0), Process.LOST: (0, 1)}  # the side of the box that has the loop
MIDDLE = (400, 225)
HALF_WIDTH, HALF_HEIGHT = 56, 22
LINE = 16  # between two lines of text
STROKE = 'fill="none" stroke="#57606a" stroke-width="1.5" marker-end="url(#head)"'


def sentences(states: type[Enum]) -> dict[str, str]:
    """Return the comment behind each member of an Enum."""
    source = inspect.getsource(states)
    lines = source.splitlines()
    members = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    return {
        node.targets[0].id.lower(): lines[node.lineno - 1].partition("# ")[2]  # type: ignore[attr-defined]
        for node in members
        if isinstance(node, ast.Assign)
    }


def arrows() -> dict[tuple[Process, Process], list[str]]:
    """Return the events that lead from one state to another. close() is possible in all states, and not among them."""
    found: dict[tuple[Process, Process], list[str]] = {}
    for (before, event), afters in TABLE.items():
        for after in afters:
            if event is not Closed:
                found.setdefault((before, after), []).append(event.__name__)
    return found


def label(x: float, y: float, names: list[str], side: float) -> str:
    """Return the names of events below each other, on that side of the point: 1 right, -1 left, 0 centred."""
    anchor = "start" if side > 0 else "end" if side < 0 else "middle"
    top = y - LINE * (len(names) - 1) / 2 + 4.5
    lines = (f'<tspan x="{x:.0f}" y="{top + LINE * row:.0f}">{name}</tspan>' for row, name in enumerate(names))
    return f'<text text-anchor="{anchor}" fill="#57606a">{"".join(lines)}</text>'


def border(centre: tuple[float, float], aside: tuple[float, float], ahead: tuple[float, float]) -> tuple[float, float]:
    """Return where a line that goes ahead, beside the middle of a box, leaves the box."""
    distances = [
        (half + 4 - shift * (1 if along > 0 else -1)) / abs(along)
        for half, shift, along in zip((HALF_WIDTH, HALF_HEIGHT), aside, ahead, strict=True)
        if along
    ]
    return centre[0] + aside[0] + min(distances) * ahead[0], centre[1] + aside[1] + min(distances) * ahead[1]


def arrow(before: Process, after: Process, names: list[str], returns: bool) -> str:
    """Return an arrow between two boxes, and its label; if another arrow returns, each keeps to its right."""
    (x, y), (to_x, to_y) = CENTRES[before], CENTRES[after]
    length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
    ahead_x, ahead_y = (to_x - x) / length, (to_y - y) / length
    right_x, right_y = -ahead_y, ahead_x
    if not returns and right_x * ((x + to_x) / 2 - MIDDLE[0]) + right_y * ((y + to_y) / 2 - MIDDLE[1]) < 0:
        right_x, right_y = -right_x, -right_y  # the label of a single arrow stands outside
    aside = (8 * right_x * returns, 8 * right_y * returns)
    x, y = border(CENTRES[before], aside, (ahead_x, ahead_y))
    to_x, to_y = border(CENTRES[after], aside, (-ahead_x, -ahead_y))
    away = 10 + LINE * abs(right_y) * len(names) / 2
    side = 0 if abs(right_x) < 0.3 else right_x
    beside = label((x + to_x) / 2 + right_x * away, (y + to_y) / 2 + right_y * away, names, side)
    return f'<path d="M{x:.0f},{y:.0f} L{to_x:.0f},{to_y:.0f}" {STROKE}/>{beside}'


def loop(state: Process, names: list[str]) -> str:
    """Return an arrow from a box to itself, and its label."""
    (x, y), (out_x, out_y) = CENTRES[state], LOOPS[state]
    x, y = x + out_x * (HALF_WIDTH + 3), y + out_y * (HALF_HEIGHT + 3)
    along_x, along_y = abs(out_y) * 14, abs(out_x) * 10
    path = (
        f"M{x - along_x},{y - along_y} C{x - 2 * along_x + out_x * 34},{y - 2 * along_y + out_y * 34} "
        f"{x + 2 * along_x + out_x * 34},{y + 2 * along_y + out_y * 34} {x + along_x},{y + along_y}"
    )
    beside = label(x + out_x * 34, y, names, out_x) if out_x else label(x + 30, y + 24, names, 1)
    return f'<path d="{path}" {STROKE}/>{beside}'


def drawing() -> str:
    """Return the diagram of the process states as SVG."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 480" width="800" height="480"',
        '  font-family="sans-serif" font-size="13" fill="#24292f">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">',
        '<path d="M0,0 L8,4 L0,8 z" fill="#57606a"/></marker></defs>',
        '<rect width="800" height="480" rx="8" fill="#f6f8fa"/>',
    ]
    x, y = CENTRES[Process.NONE][0] - 32, CENTRES[Process.NONE][1]
    parts.append(f'<circle cx="{x}" cy="{y - 95}" r="6"/><path d="M{x},{y - 87} V{y - HALF_HEIGHT - 3}" {STROKE}/>')
    found = arrows()
    for (before, after), names in found.items():
        if before is after:
            parts.append(loop(before, names))
        else:
            parts.append(arrow(before, after, names, returns=(after, before) in found))
    for state, (x, y) in CENTRES.items():
        parts += [
            f'<rect x="{x - HALF_WIDTH}" y="{y - HALF_HEIGHT}" width="{2 * HALF_WIDTH}" height="{2 * HALF_HEIGHT}"',
            '  rx="8" fill="#ffffff" stroke="#0969da" stroke-width="1.5"/>',
            f'<text x="{x}" y="{y + 5}" text-anchor="middle" font-size="15" font-weight="bold">{state.value}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def table(title: str, states: type[Enum]) -> str:
    """Return the states with their sentences."""
    rows = [f"| `{name}` | {sentence} |" for name, sentence in sentences(states).items()]
    return "\n".join([f"| {title} | |", "|---|---|", *rows])


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "states.svg"
    file.write_text(drawing())
    print(table("process", Process), "", table("episode", Episode), sep="\n")
