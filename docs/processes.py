"""Draw the processes of a vector env as ``docs/processes.svg``.

    python docs/processes.py

Boxes and arrows are plain SVG, in colours that are readable on light and dark pages.
"""

from pathlib import Path
from xml.sax.saxutils import escape

BOXES = {  # x, y, width, height, lines; a snapshot is dashed
    "trainer": (20, 130, 190, 90, ["trainer", "your loop, the journal"], False),
    "monitor": (330, 20, 210, 70, ["monitor", "launches, watches, ends"], False),
    "worker 0": (330, 130, 210, 90, ["worker 0", "env 0, env 1, env 2, env 3"], False),
    "snapshot 0": (620, 140, 170, 70, ["snapshot of 0", "a frozen fork"], True),
    "worker 1": (330, 260, 210, 90, ["worker 1", "env 4, env 5, env 6, env 7"], False),
    "snapshot 1": (620, 270, 170, 70, ["snapshot of 1", "a frozen fork"], True),
}
ARROWS = [  # from, to, text, where the text is
    ((210, 160), (330, 160), "shared memory", (270, 150)),
    ((330, 190), (210, 190), "", (0, 0)),
    ((210, 205), (330, 290), "", (0, 0)),
    ((330, 310), (190, 220), "", (0, 0)),
    ((330, 40), (90, 130), "who has died, and how", (140, 60)),
    ((150, 130), (330, 70), "launch", (285, 100)),
    ((435, 90), (435, 130), "", (0, 0)),
    ((540, 175), (620, 175), "forks", (580, 165)),
    ((540, 305), (620, 305), "forks", (580, 295)),
]


def text(x: float, y: float, line: str, size: int = 13, weight: str = "normal") -> str:
    """Return a centred line."""
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="middle">{escape(line)}</text>'


def drawing() -> str:
    """Return the SVG."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 810 370" width="810" height="370"',
        '  font-family="sans-serif" fill="#24292f">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>',
        '<rect width="810" height="370" rx="8" fill="#f6f8fa"/>',
    ]
    for x, y, width, height, (name, what), is_frozen in BOXES.values():
        dash = ' stroke-dasharray="6 4"' if is_frozen else ""
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="#ffffff" stroke="#0969da"{dash}/>'
        )
        middle = x + width / 2
        parts += [
            text(middle, y + height / 2 - 6, name, 15, "bold"),
            text(middle, y + height / 2 + 16, what, 12),
        ]
    for (x1, y1), (x2, y2), line, (x, y) in ARROWS:
        ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
        parts.append(f'<line {ends} stroke="#57606a" stroke-width="1.5" marker-end="url(#tip)"/>')
        if line:
            parts.append(text(x, y, line, 12))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawing())
