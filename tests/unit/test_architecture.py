"""The rooms of the package: none imports one above it, which is nearer to the user; the wall; and what else keeps it small to read."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import cloudpickle
import gymnasium

import multienv
import multienv.errors
import multienv.testing

PACKAGE = Path(multienv.__file__).parent
# Lowest first; the rooms of one line do not import each other, but for those of the first.
FLOORS = [
    ["errors", "config", "events"],
    ["version", "publishing", "interrupts", "sometimes", "native"],
    ["threads", "cores"],
    ["wire"],
    ["worker"],
    ["processes"],
    ["reports"],
    ["recovery"],
    ["building"],
    ["asking"],
    ["cluster"],
    ["envs"],
    ["vector"],
    ["managers"],
    ["adapters"],
    ["testing"],
    ["cli"],
    ["__main__"],
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ORDERED = {"errors": 0, "config": 1, "events": 2}  # inside the first line
# All that users meet; what the engine may know of it; and the rooms whose names they are told.
FACES = {"envs", "vector", "managers", "adapters", "testing", "cli", "__main__"}
VALUES = {"errors", "config", "events"}
PUBLIC = {"", *VALUES, "managers", "testing", "cli"}
TESTS = Path(__file__).parents[1]
# What tests of promises know of the engine all the same.
ALLOWED = {
    "invariants/test_3_all_bytes_are_evidence.py": "equal to the bit is what multienv itself calls the same",
    "contract/contract_envs.py": "counts the shared files of a process, by their name",
    "contract/test_shared_data.py": "the same; and reads a crash report as `multienv replay` does",
    "contract/test_building.py": "builds an env as the command does",
    "contract/auto_deadline_trainers.py": "a program of its own, which no fixture reaches",
    "contract/test_auto_deadlines.py": "a deadline that was found is shown nowhere before it has passed",
    "contract/test_async_env.py": "looks how many launches are under way",
    "contract/test_multi_env.py": "breaks off one function, as a signal handler may",
    "contract/test_own_pace.py": "the same",
    "contract/test_surroundings.py": "the list of variables",
}
ON_TOP = {"adapters", "testing", "cli", "__main__"}
MOST_FLOORS = 12
# What extras install; imported where it is used, with an error that names the extra. And what only AsyncEnv needs.
HEAVY = [
    "typer", "rich", "torch", "stable_baselines3", "ray", "matplotlib", "moviepy", "cv2", "mujoco", "ale_py",
    "tensorboard", "prometheus_client", "pettingzoo", "asyncio",
]  # fmt: skip
CORE = {"gymnasium", "numpy", "cloudpickle", "typing_extensions", "multienv"}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"}


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@cache
def imports(name: str) -> dict[str, set[str]]:
    """The modules of the package that this one imports, anywhere in it, and which names of each."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            pairs = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            pairs = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, imported in pairs:
            if module.split(".")[0] == "multienv":
                inside = module.removeprefix("multienv").lstrip(".")
                as_module = f"{inside}.{imported}".lstrip(".")
                if as_module in MODULES:  # from multienv._engine.worker import seeding
                    found.setdefault(as_module, set())
                else:
                    found.setdefault(inside, set()).add(imported)
    return found


def room_of(name: str) -> str:
    return name.removeprefix("_engine.").split(".")[0]


def test_every_module_lies_in_a_room():
    assert {room_of(name) for name in MODULES} == {*FLOOR_OF, "_engine"}
    assert {name.split(".")[0] for name in MODULES} == {*FACES, *VALUES, "_engine"}


def test_the_engine_imports_no_face_and_a_value_nothing_but_values():
    for name, other in ((module, other) for module in MODULES for other in imports(module)):
        inside, theirs = name.split(".")[0], other.split(".")[0]
        if inside == "_engine":
            assert theirs in {"_engine", *VALUES}, f"{name} imports {other}"
        elif inside in VALUES:
            assert theirs in VALUES, f"{name} imports {other}"
    for name in (module for module in MODULES if module.split(".")[0] == "_engine"):
        text = [
            one.value for one in ast.walk(tree_of(name)) if isinstance(one, ast.Constant) and isinstance(one.value, str)
        ]
        by_name = {found for one in text for found in re.findall(r"(?<![~\w.])multienv\.(\w+)", one)} & FACES
        assert not by_name, f"{name} names {by_name}"  # to import it, or for another interpreter


def test_what_has_no_underscore_in_the_engine_has_a_docstring():
    """Ruff asks for none in a package whose name begins with one."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for name in (name for name in MODULES if name.startswith("_engine")):
        tree = tree_of(name)
        assert ast.get_docstring(tree), name
        for node in [tree, *(one for one in tree.body if isinstance(one, ast.ClassDef) and one.name[0] != "_")]:
            for one in node.body:
                if isinstance(one, kinds) and one.name[0] != "_":
                    is_bare = ast.unparse(one.body[-1]) == "..." or ".setter" in ast.unparse(one).split("def ")[0]
                    assert is_bare or ast.get_docstring(one), f"{name}: {one.name}"


def test_tests_of_promises_import_public_names_alone():
    public = {f"multienv.{one}".rstrip(".") for one in PUBLIC}
    found = set()
    for path in [*(TESTS / "invariants").glob("*.py"), *(TESTS / "contract").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module == "multienv":  # names, or modules
                names = [f"multienv.{one.name}" for one in node.names if one.name not in multienv.__all__]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            ours = {one for one in names if one.split(".")[0] == "multienv"}
            if {one for one in ours if not one.startswith("multienv.adapters.")} - public:
                found.add(str(path.relative_to(TESTS)))
    assert found == ALLOWED.keys()


def test_a_module_imports_only_its_own_room_and_rooms_below_it():
    for name, other in ((module, other) for module in MODULES for other in imports(module)):
        room, theirs = room_of(name), room_of(other)
        if not theirs:  # the package itself: what users have
            assert room in ON_TOP, f"{name} imports the package itself"
        elif theirs == room:
            continue
        elif theirs in ORDERED and room in ORDERED:
            assert ORDERED[theirs] < ORDERED[room], f"{name} imports {other}"
        else:
            assert FLOOR_OF[theirs] < FLOOR_OF[room], f"{name} imports {other}, which is not below it"


def test_no_private_name_of_another_module_is_used():
    for name in MODULES:
        for other, names in imports(name).items():
            private = {one for one in names if one.startswith("_") and not one.startswith("__")}
            assert not private, f"{name} imports {private} from {other}"
        modules = {one.asname or one.name.split(".")[-1] for node in ast.walk(tree_of(name))
                   if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multienv")
                   for one in node.names if f"{node.module}.{one.name}".removeprefix("multienv.") in MODULES}  # fmt: skip
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                private = node.attr.startswith("_") and not node.attr.startswith("__")
                assert not private, f"{name} uses {node.value.id}.{node.attr}"


def test_inheritance_inside_the_package_is_two_levels_at_most():
    """The tree of errors aside, and what needs extras."""
    found = {}
    for name in MODULES:
        if room_of(name) not in {"adapters", "cli", "__main__"}:
            for kind in vars(importlib.import_module(f"multienv.{name}")).values():
                if inspect.isclass(kind) and not issubclass(kind, BaseException):
                    found[kind] = sum(base.__module__.split(".")[0] == "multienv" for base in kind.__mro__)
    assert [kind for kind, depth in found.items() if depth > 2] == []
    assert len(found) > 50


def test_modules_import_each_other_in_no_circle_and_on_at_most_twelve_floors():
    sorter = TopologicalSorter({name: imports(name).keys() & MODULES for name in MODULES})
    sorter.prepare()  # raises for a circle
    floors = []
    while names := sorter.get_ready():
        floors.append([name for name in names if room_of(name) not in ON_TOP and name != "vector.ray_vector_env"])
        sorter.done(*names)
    assert not any(floors[MOST_FLOORS:]), floors


def test_importing_the_package_imports_nothing_heavy():
    code = f"import sys, multienv; print([name for name in {HEAVY} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert told.stdout.strip() == "[]"


def test_the_core_imports_nothing_but_its_dependencies():
    for name in (name for name in MODULES if room_of(name) not in {"cli", "adapters"}):
        for node in ast.walk(tree_of(name)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for one in names:
                assert one.split(".")[0] in CORE | set(sys.stdlib_module_names), f"{name} imports {one}"


# --- the public face ----------------------------------------------------------------------------

NAMES = {
    "AsyncEnv", "AsyncSubprocessEnvManager", "AutoResetWrapper", "BatchOptions", "Deadlines", "EnvManagerConfig", "Fragment", "Loss", "MultiEnv", "RayEnv",
    "RayOptions", "RayVectorEnv", "Recovery", "Recycled", "ReplacedVectorEnvs", "ResetWith", "RestartPolicy", "SerialEnv", "SerialVectorEnv", "Snapshot", "StackedSubprocessEnvManager", "Statistics",
    "SubprocessEnv", "SubprocessVectorEnv", "SyncSubprocessEnvManager", "Timestep", "WorkerOptions", "create_ray_envs", "create_subprocess_envs", "flat_statistics", "has_native_extension", "make_vec", "replace_vector_envs",
}  # fmt: skip


def test_the_public_names_are_these_and_the_errors():
    assert set(multienv.__all__) == NAMES | set(multienv.errors.__all__)
    assert len(multienv.__all__) == len(set(multienv.__all__))
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?\w+)?", multienv.__version__)


def test_public_things_say_where_they_are_imported_from():
    later = [
        multienv.AsyncEnv,
        multienv.RayEnv,
        multienv.RayVectorEnv,
        multienv.create_ray_envs,
        multienv.ReplacedVectorEnvs,
    ]
    things = [getattr(multienv, name) for name in NAMES - {"has_native_extension"}]
    assert [thing for thing in [*things, *later] if thing.__module__ != "multienv"] == []
    for module in (multienv.errors, multienv.testing):
        assert [name for name in module.__all__ if getattr(module, name).__module__ != module.__name__] == []
    for thing in (*things, *(getattr(multienv.testing, name) for name in multienv.testing.__all__)):
        assert pickle.loads(pickle.dumps(thing)) is cloudpickle.loads(cloudpickle.dumps(thing)) is thing
        if is_dataclass(thing):  # its annotations, which are text, are found where they were written
            assert typing.get_type_hints(thing).keys() == {one.name for one in fields(thing)}
    policy = multienv.RestartPolicy(max_rss=2**30)
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_public_things_and_their_methods_are_documented():
    for name in NAMES:
        thing = getattr(multienv, name)
        assert inspect.getdoc(thing)
        for method, value in vars(thing).items() if inspect.isclass(thing) else ():
            if inspect.isfunction(value) and not method.startswith("_"):
                inherited = any(hasattr(base, method) for base in (gymnasium.Env, gymnasium.vector.VectorEnv))
                assert value.__doc__ or inherited, f"{name}.{method}"
