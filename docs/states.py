"""Draw the states of a supervised worker, as a Mermaid diagram and as tables, from the state machine itself.

    python docs/states.py

What it prints stands in docs/design.md; a test says that it does.
"""

import ast
import inspect
from enum import Enum

from multienv.recovery import state_machine
from multienv.recovery.state_machine import TABLE, Closed, Episode, Process


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


def diagram() -> str:
    """Return the diagram of the process states; close() is possible in all of them and not drawn."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, event), afters in TABLE.items():
        for after in afters:
            if event is not Closed:
                arrows.setdefault((before.value, after.value), []).append(event.__name__)
    lines = ["stateDiagram-v2", "    [*] --> none"]
    lines += [f"    {before} --> {after}: {', '.join(names)}" for (before, after), names in sorted(arrows.items())]
    return "\n".join(["```mermaid", *lines, "```"])


def table(title: str, states: type[Enum]) -> str:
    """Return the states with their sentences."""
    rows = [f"| `{name}` | {sentence} |" for name, sentence in sentences(states).items()]
    return "\n".join([f"| {title} | |", "|---|---|", *rows])


if __name__ == "__main__":
    assert inspect.getdoc(state_machine)
    print(diagram(), "", table("process", Process), "", table("episode", Episode), sep="\n")
