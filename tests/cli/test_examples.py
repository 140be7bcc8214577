"""The examples run as a newcomer runs them, small; and so does every Python block of the README and the docs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import multienv

ROOT = Path(__file__).parents[2]
SOURCE = str(Path(multienv.__file__).parents[1])
KILLED = re.compile(r"(\d+) workers died; (\d+) recoveries were exact, 0 replayed, 0 truncated; nothing was lost\.")
QUOTING = ("learners.md", "recipes.md", "tutorial.md")  # they quote code that other tests run
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in QUOTING)]


def run(directory: Path, *arguments: str, status: int = 0) -> str:
    """What a Python that is started there prints; it must exit with this status."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=250,  # only ends what is stuck: on a busy machine more workers are killed in a round, too
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def example(directory: Path, name: str, *arguments: str) -> str:
    return run(directory, str(ROOT / "examples" / name), *arguments)


def test_the_picture_of_a_killed_worker_is_what_its_script_draws(tmp_path):
    """But for the times of the recoveries, and the error of the peer."""
    run(ROOT, "docs/killed_worker.py", str(tmp_path / "new.svg"))
    drawn, old = (
        re.sub(r"after \d+ ms|>\w+Error", "", file.read_text())
        for file in (tmp_path / "new.svg", ROOT / "docs/killed_worker.svg")
    )
    assert "SIGKILL" in drawn
    assert drawn == old


def test_the_vector_env_that_the_first_chapter_for_contributors_shows(tmp_path):
    assert re.fullmatch(r"[\d,]+ steps\n", run(tmp_path, str(ROOT / "benchmarks/bare.py")))


@pytest.mark.parametrize(
    "face",
    [pytest.param((), id="one env in each worker"), pytest.param(("--vector",), id="several", marks=pytest.mark.ci)],
)
def test_the_actor_critic_while_its_workers_are_killed(tmp_path, face):
    told = example(tmp_path, "actor_critic.py", "--total-steps", "6000", "--chaos", "4", "--verify", *face)
    killed = KILLED.search(told)
    assert killed is not None, told
    assert int(killed[1]) == int(killed[2]) > 5
    assert "identical to the undisturbed run" in told
    assert (tmp_path / "actor_critic.png").read_bytes().startswith(b"\x89PNG")


SOLVED_EARLY = """
import sys
import gymnasium
import actor_critic

gymnasium.spec("CartPole-v1").reward_threshold = 18.125
save = actor_critic.Figure.savefig

def savefig(figure, *arguments, **options):
    save(figure, *arguments, **options)
    left, bottom, width, height = figure.legends[0].get_window_extent().bounds
    assert min(left, bottom) >= 0 and left + width <= figure.bbox.width

actor_critic.Figure.savefig = savefig
sys.stderr = sys.stdout
sys.exit(actor_critic.main(["--chaos", "8", "--verify"]))
"""


@pytest.mark.ci
def test_the_actor_critic_solves_a_task_with_a_full_bar_the_same_time_in_bar_and_text_and_a_whole_legend(tmp_path):
    told = run(tmp_path, "-c", f"import sys; sys.path.append({str(ROOT / 'examples')!r})\n{SOLVED_EARLY}")
    bar = re.search(r"chaos +(━+) return .* recovered +([\d.]+ s)", told)
    assert bar, told  # in a pipe the rest of a bar is blank
    assert len(bar[1]) > 20
    assert re.search(rf"\nsolved: .*\n.* steps, {bar[2]};", told), told


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("collect_episodes.py", ("--episodes", "20", "--slowest", "0.002", "--kills", "0.002"), "episodes"),
        ("pipelined.py", ("--rounds", "3", "--repeats", "1", "--num-envs", "8"), "steps"),
        ("first_ready.py", ("--seconds", "2", "--chaos"), "times as many steps"),
        ("go_explore.py", ("--iterations", "3", "--steps", "20"), "score"),
    ],
)
def test_an_example(tmp_path, name, arguments, expected):
    assert expected in example(tmp_path, name, *arguments).lower()


@pytest.mark.ci
def test_a_lost_episode_in_a_sandbox_is_masked_and_the_sandbox_released(tmp_path):
    told = example(tmp_path, "sandbox_agents.py", "--episodes", "2", "--slowest", "0.05")
    assert "16 agents took" in told
    assert "Mean reward of 31 episodes: 1.00." in told
    assert told.count("Masked: agent 15, episode 0; its sandbox was released: True.") == told.count("Masked") == 1
    assert "Sandboxes left: 0." in told


@pytest.mark.ci
def test_ppo_of_stable_baselines3_while_its_workers_are_killed(tmp_path):
    told = example(tmp_path, "ppo_sb3.py", "--total-steps", "6000", "--chaos")
    learnt = re.search(r"The return went from .* to .*; (\d+) workers died meanwhile\.", told)
    assert learnt is not None, told
    assert int(learnt[1]) > 0


@pytest.mark.ci
def test_ppo_in_torch_learns_the_same_while_its_workers_are_killed(tmp_path):
    few = ["--total-steps", "8192", "--num-envs", "16", "--steps", "32"]
    calm, struck = (example(tmp_path, "ppo_torch.py", *few, *chaos) for chaos in ((), ("--chaos",)))
    killed = KILLED.search(struck)
    assert killed is not None, struck
    assert int(killed[1]) == int(killed[2]) > 0
    assert means(struck) == means(calm)
    assert means(calm)[-1] > means(calm)[0]


@pytest.mark.ci
def test_ppo_in_torch_plays_an_atari_game(tmp_path):
    few = ["--env", "ALE/Pong-v5", "--num-envs", "2", "--steps", "16", "--total-steps", "64", "--epochs", "1"]
    told = example(tmp_path, "ppo_torch.py", *few)
    assert "64 steps: mean return" in told
    assert "nothing was lost" in told


def means(told: str) -> list[float]:
    return [float(mean) for mean in re.findall(r"mean return +([\d.]+);", told)]


@pytest.mark.ci
def test_self_play_learns_to_beat_a_random_player_while_its_workers_are_killed(tmp_path):
    told = example(tmp_path, "self_play.py", "--games", "2000", "--chaos")
    killed = KILLED.search(told)
    assert killed is not None, told
    assert int(killed[1]) == int(killed[2]) > 0
    before, after = (float(lost) for lost in re.findall(r"lost ([\d.]+)%", told))
    assert after < before / 1.5


@pytest.mark.ci
def test_two_players_learn_to_be_unpredictable_while_their_envs_are_killed(tmp_path):
    told = example(tmp_path, "rock_paper_scissors.py", "--rounds", "750", "--num-envs", "4", "--chaos")
    killed = KILLED.search(told)
    assert killed is not None, told
    assert int(killed[1]) == int(killed[2]) > 0
    before, after = re.search(r"won ([\d.]+) per round at first, and ([\d.]+) at the end", told).groups()
    assert float(after) < float(before) / 1.5


@pytest.mark.ci
def test_the_training_of_the_tutorial_sees_the_same_as_without_bugs(tmp_path):
    page = (ROOT / "docs" / "tutorial.md").read_text()
    calm, struck = (example(tmp_path, "tutorial/train.py", *kind) for kind in (["sync"], []))
    prints = [re.search(r"fingerprint: (\w+)", told).group(1) for told in (calm, struck)]
    assert prints[0] == prints[1]
    assert means_of(calm) == means_of(struck) == means_of(page)[: len(means_of(calm))]
    losses, exact, truncated, replaced = (int(number) for number in re.findall(r": (\d+)$", struck, re.MULTILINE))
    assert losses == exact > 0
    assert truncated == 0
    assert replaced > 0


def means_of(told: str) -> list[str]:
    return re.findall(r"iteration \d+: mean reward [\d.]+", told)


@pytest.mark.ci
def test_the_bug_of_the_tutorial_that_strikes_each_time_truncates_and_strikes_in_a_replay(tmp_path, monkeypatch):
    monkeypatch.setenv("MULTIENV_REPORTS", str(tmp_path / "reports"))
    told = example(tmp_path, "tutorial/low_room.py")
    assert "truncated: [ True False]" in told
    assert "The same step() ended 2 processes; it was not tried again." in told
    replayed = run(tmp_path, "-m", "multienv", "replay", "latest", status=1)
    assert "Now the fatal request: step(array([1])), after 8 steps of its episode" in replayed


def blocks(page: Path) -> list[str]:
    """The Python of a page, less what stands behind a comment ``<!-- not run: why -->``."""
    found = re.findall(
        r"(^<!-- not run: [^\n]+ -->\n+)?^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return [block for opted_out, block in found if not opted_out]


def test_the_line_that_the_readme_changes_does_the_same_as_before(tmp_path):
    readme = (ROOT / "README.md").read_text()
    old, new = re.search(r"^```diff\n-(.*)\n\+(.*)\n```", readme, re.MULTILINE).groups()
    options = ", ".join(re.findall(r"`(\w+=multienv\..*?)`", readme))
    assert "Deadlines" in options
    assert "max_rss" in options
    lines = ["import gymnasium, multienv, numpy", "env_fns = [lambda: gymnasium.make('CartPole-v1')] * 2"]
    for line in (old, new, f"{new[:-1]}, {options})"):
        lines += [line, "print(envs.reset(seed=0)[0].tobytes())", "envs.close()"]
    (tmp_path / "changed.py").write_text("\n".join(lines))
    assert len(set(run(tmp_path, "changed.py").splitlines())) == 1


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[] if page.name == "README.md" else [pytest.mark.ci])
        for page in PAGES
        if blocks(page)
    ],
)
def test_the_python_of_a_page(tmp_path, page):
    """One after the other, as somebody would type them."""
    script = tmp_path / "typed.py"
    body = "\n".join(blocks(page))
    script.write_text(f'if __name__ == "__main__":\n{re.sub("^(?=.)", "    ", body, flags=re.MULTILINE)}')
    run(tmp_path, str(script))
