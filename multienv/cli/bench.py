"""``multienv bench``: measures a batch of an env in several layouts, and recommends one."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from multienv import RayOptions
from multienv.cli.measuring import PEERS, WORTH_IT, Bench, Rounds, measure
from multienv.cli.options import (
    BackendOption,
    EnvArgument,
    JsonOption,
    KwargsOption,
    NumEnvsOption,
    at_work,
    checked_backend,
    first_line,
    plain_console,
    refuse,
    share_import_path,
    vector_env_code,
    working_env,
)
from multienv.cores import cores


def bench(
    env: EnvArgument,
    num_envs: NumEnvsOption = 8,
    against: Annotated[str, typer.Option(help="gymnasium, sb3, both with a comma, or none.")] = "gymnasium",
    seconds: Annotated[float, typer.Option(min=0.01, help="How long each turn takes.")] = 0.25,
    repeats: Annotated[int, typer.Option(min=1, help="How many turns each contender has.")] = 7,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this file.", metavar="FILE")] = None,
    backend: BackendOption = "subprocess",
    address: Annotated[str | None, typer.Option(help="With ray: of the cluster. Else a local one is started.")] = None,
    env_kwargs: KwargsOption = "{}",
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a batch of an env steps: which layout is best, and how near is it to what the cores can do?

    All contenders are built first, then they step in turns, with random actions.
    Ratios and shares are medians over the turns. Run it on an idle machine.

    The limit is what the cores can do: a process on each steps an env, and nothing else.

    For example:

    multienv bench CartPole-v1 --envs 32

    multienv bench my_envs.py:MyEnv --against gymnasium,sb3 --plot bench.png

    multienv bench CartPole-v1 --backend ray --address ray-head:6379
    """
    peers = _peers(against)
    ray = RayOptions(address=address) if checked_backend(backend) == "ray" else None
    if address is not None and ray is None:
        refuse("--address is that of a Ray cluster: give --backend ray, too.")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        refuse('--plot needs matplotlib: pip install -e ".[plot]" in a checkout of multienv.')
    load = os.getloadavg()[0]
    with at_work("building ...", as_json=as_json) as status:
        found = working_env(env, env_kwargs)
        if ray is not None:
            share_import_path()
        try:
            result = measure(
                found.env_fn, num_envs, peers, seconds=seconds, repeats=repeats, ray=ray, told=status.update
            )
        except Exception as error:  # of the env, of other libraries
            refuse(f"{env} cannot be measured: {first_line(error)} `multienv doctor {env}` says more.")
    code = vector_env_code(found, num_envs, result.recommended.options or "")
    if as_json:
        print(json.dumps({"env": env, "num_envs": num_envs, **_document(result), "code": code}, indent=1))
    else:
        if load > len(cores()):
            print(f"This machine is busy (load {load:.0f}): do not trust these figures.", file=sys.stderr)
        _show(plain_console(), f"{env} × {num_envs} on {len(cores())} cores", result, code)
    if plot is not None:
        _draw(plot, f"{env} × {num_envs}", result)


def _peers(against: str) -> list[str]:
    peers = [one.strip() for one in against.split(",") if one.strip() not in ("", "none")]
    for one in peers:
        if one not in PEERS:
            refuse(f"--against {against}: choose some of {', '.join(PEERS)}, with a comma between them, or none.")
    if "sb3" in peers and importlib.util.find_spec("stable_baselines3") is None:
        refuse('--against sb3 needs Stable-Baselines3: pip install -e ".[sb3]" in a checkout of multienv.')
    return peers


def _document(result: Bench) -> dict[str, Any]:
    best, limit = result.recommended, result.limit
    contenders = [
        {
            "package": one.package,
            "name": one.name,
            "steps_per_second": one.rate,
            "share_of_limit": one.ratio(limit),
            "recommended_is_faster_by": best.ratio(one),
            "rates": one.rates,
        }
        for one in result.contenders
    ]
    return {
        "contenders": contenders,
        "left_out": result.left_out,
        "limit": {"steps_per_second": limit.rate, "rates": limit.rates, "cores": len(cores())},
        "time": {"env_steps": best.ratio(limit), "everything_else": 1 - best.ratio(limit)},
        "kill_to_next_step": {"seconds": result.kills, "exact": result.exact},
        "recommended": best.name,
        **({} if result.rounds is None else {"ray": _ray_document(result.rounds)}),
    }


def _ray_document(rounds: Rounds) -> dict[str, Any]:
    return {
        "rounds_per_second": rounds.rate,
        "steps_per_second": rounds.steps.rate,
        "steps_per_second_in_fragments": rounds.fragments.rate,
        "share_of_env_steps": rounds.share_of_steps,
        "network_limits": rounds.network_limits,
    }


def _show(console: Console, title: str, result: Bench, code: str) -> None:
    best, limit = result.recommended, result.limit
    table = Table("", title, box=None, pad_edge=False)
    for header in ("steps/s", "of the limit", "recommended is faster by"):
        table.add_column(header, justify="right")
    for one in (*sorted(result.contenders, key=lambda one: -one.ratio(limit)), limit):
        ratio = "" if one in (best, limit) else f"{best.ratio(one):.2f} ×"
        row = (one.package, one.name, f"{one.rate:,.0f}", f"{one.ratio(limit):.2f}", ratio)
        table.add_row(*row, style="bold" if one is best else "")
    console.print(table)
    for name, why in result.left_out.items():
        console.print(f"Left out: {name}: {why}", style="yellow")
    console.print()
    share = min(1.0, best.ratio(limit))
    console.print(f"Where the time goes: {share:.0%} into env steps, {1 - share:.0%} into everything else.")
    killed = 1000 * statistics.median(result.kills)
    how = "exactly" if result.exact == len(result.kills) else f"{result.exact} of {len(result.kills)} exactly"
    console.print(f"From SIGKILL to the next step: {killed:.0f} ms, recovered {how}.")
    if any(one.is_local and one.ratio(best) > WORTH_IT for one in result.contenders):
        console.print("In this very process it is faster: from processes this env gains nothing but survival.")
    if result.rounds is not None:
        _show_rounds(console, result.rounds)
    console.print("Recommended:")
    for line in code.splitlines():
        console.print(f"    {line}", soft_wrap=True)


def _show_rounds(console: Console, rounds: Rounds) -> None:
    told = f"{rounds.rate:,.0f} rounds/s, {rounds.steps.rate:,.0f} steps/s; in fragments {rounds.fragments.rate:,.0f}"
    share = f"{1000 / rounds.rate:.1f} ms, {rounds.share_of_steps:.0%} of it env steps"
    console.print(f"On Ray: {told} steps/s. A round takes {share}.")
    if rounds.network_limits:
        console.print("The call over the network is what limits there: ask for many steps a call, envs.rollout().")


def _draw(path: Path, title: str, result: Bench) -> None:
    """Draw the share of the limit of each contender as a bar."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    ordered = sorted(result.contenders, key=lambda one: one.ratio(result.limit))
    names, shares = [f"{one.package}: {one.name}" for one in ordered], [one.ratio(result.limit) for one in ordered]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.4 * len(ordered)), layout="constrained")
    colours = ["tab:blue" if one.package.startswith("multienv") else "tab:gray" for one in ordered]
    axes.barh(names, shares, color=colours)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("share of the limit")
    axes.set_title(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
