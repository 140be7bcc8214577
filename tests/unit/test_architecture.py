"""The public names, and the layers: none imports one above it."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import multienv
import multienv.testing

PACKAGE = Path(multienv.__file__).parent

PUBLIC = [
    "AsyncSubprocessEnvManager",
    "AutoResetWrapper",
    "Deadlines",
    "MultiEnv",
    "RestartPolicy",
    "SerialEnv",
    "SerialVectorEnv",
    "Snapshot",
    "StackedSubprocessEnvManager",
    "SubprocessEnv",
    "SubprocessVectorEnv",
    "SyncSubprocessEnvManager",
    "create_subprocess_envs",
    "make_vec",
    "register_state_hook",
]
PUBLIC_TESTING = [
    "CounterEnv", "FailsNthTime", "Fault", "FaultError", "FaultyEnv", "ForkingEnv", "GlobalRandomEnv", "Ignored", "KillManner",
    "Killer", "LeakError", "LeakyEnv", "Manner", "Moment", "NoisyEnv", "NondeterministicEnv", "PidEnv", "ProcessRecord",
    "RecoverableEnv", "RecoveryCheck", "Resources", "SameArrayEnv", "SlowEnv", "SpaceEnv", "StickyStateEnv", "Strike",
    "TokenSpace", "Transition", "TwoArgumentError", "WallClockInfoEnv", "assert_no_splice", "assert_nothing_left",
    "assert_same_trajectory", "check_env_recovers", "check_recovery", "counter_clock", "descendants", "digest_value",
    "example_spaces", "first_difference", "is_alive", "misbehave", "multiprocessing_helpers", "no_leaks", "observations_equal",
    "rollout", "snapshot_resources", "what_is_left",
]  # fmt: skip

# Lowest first; modules of one line may import each other.
LAYERS = [
    ["errors", "config", "events"],
    ["threads", "cores", "turns", "unique"],
    ["wire"],
    ["reports"],
    ["worker"],
    ["processes"],
    ["backends"],
    ["recovery"],
    ["remote_generator"],
    ["hosted_env", "autoreset", "subprocess_env", "rounds", "multi_env"],
    [
        "rendering",
        "vector_arguments",
        "vector_spaces",
        "vector_rounds",
        "vector_calls",
        "vector_env",
        "vector_dealing",
        "vector_parts",
        "subprocess_vector_env",
        "vector_making",
    ],
    [
        "env_states",
        "env_manager_config",
        "episode_video",
        "env_lane",
        "env_manager_loop",
        "env_manager",
        "env_manager_by_id",
        "env_manager_arguments",
        "env_manager_calls",
        "async_env_manager",
        "sync_env_manager",
        "stacked_env_manager",
    ],
    ["testing"],
    ["chaos", "replay", "cli"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imports(path: Path) -> set[str]:
    """The modules of multienv that this one imports anywhere in it, as dotted names below the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "multienv" else {node.module}
            )
    return {name.removeprefix("multienv.") for name in found if name.split(".")[0] == "multienv"}


@pytest.mark.parametrize(("module", "names"), [(multienv, PUBLIC), (multienv.testing, PUBLIC_TESTING)])
def test_the_public_names(module, names):
    assert sorted(module.__all__) == sorted(names)
    for name in names:
        assert hasattr(module, name)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_things_and_their_methods_are_documented(name):
    thing = getattr(multienv, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            if inspect.isfunction(value) and not method.startswith("_"):
                assert inspect.getdoc(value), f"{name}.{method}"


def test_there_is_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?\w+)?", multienv.__version__)


def test_every_module_has_a_layer_and_the_packages_docstring_tells_the_same_order():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert parts == set(LEVEL)
    table = re.findall(r"^    ([a-z_, …]+?)  +\S", multienv.__doc__, re.MULTILINE)
    told = [re.findall(r"[a-z_]+", line) for line in table]
    assert [names[0] for names in told] == [names[0] for names in LAYERS]
    for names, layer in zip(told, LAYERS, strict=True):
        assert set(names) <= set(layer)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_imports_one_of_a_layer_above(path):
    own = LEVEL[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]
    for name in imports(path):
        part = name.split(".")[0]
        if own == LEVEL["testing"] and part not in LEVEL:
            continue  # the conformance kit tries the public face
        assert part in LEVEL, f"{path} imports {name} from the package itself"
        assert LEVEL[part] <= own, f"{path} imports {name}, which is above it"


def test_the_test_kit_depends_on_the_face_only_and_only_when_called():
    for path in (PACKAGE / "testing").glob("*.py"):
        outside = {name for name in imports(path) if name.split(".")[0] != "testing"}
        assert outside <= ({"SubprocessEnv"} if path.name == "conformance.py" else set()), path


def test_the_core_imports_nothing_but_its_three_dependencies():
    import sys

    allowed = set(sys.stdlib_module_names) | {"multienv", "gymnasium", "numpy", "cloudpickle", "typing_extensions"}
    for path in set(MODULES) - {PACKAGE / "cli.py"}:  # it says itself what to install
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed, f"{path} imports {name}"
