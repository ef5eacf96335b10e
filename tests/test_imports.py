"""The floors: imports only go down and never in a circle, and some modules are imported in one place only or nowhere.

Imports are read from the source, those inside functions and under TYPE_CHECKING included.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "streamrl"

COMPONENTS = {"gserver", "rollout", "trainer"}
ABOVE = {"__main__", "api", "cli", "cli_options", "controller", "ecs", "function_source", "launch", "page", "planner"}
ABOVE |= COMPONENTS | {"report", "stream_dataset", "task_pool", "transport"}
"""All but what everything else stands on."""

FORBIDDEN_EVERYWHERE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
ONLY_IN = {
    "megatron": {"trainer/backends/megatron/"},
    "multiprocessing": {"gserver/sglang/entry.py", "gserver/vllm/entry.py"},  # its queues and pipes pickle
    "sglang": {"gserver/sglang/"},
    "vllm": {"gserver/vllm/"},
}
"""Files, and folders with their slash."""
PICKLING = {
    "ProcessPoolExecutor",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "recv_pyobj",
    "scatter_object_list",
    "send_object_list",
    "send_pyobj",
}
"""Functions of torch, ZMQ and the standard library that pickle what they send."""
SAFE = {"allow_pickle": False, "trust_remote_code": False, "weights_only": True}
"""Arguments by which a library may load code, and the one value that is written for them."""


def modules() -> Iterator[Path]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE)


def floor_of(module: Path) -> str:
    """The first name below `streamrl` that the module lives under."""
    first = module.parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


GROUND = {floor_of(module) for module in modules()} - {"", *ABOVE}
LOWER = GROUND | {"transport", "stream_dataset"}


def imported_names(source: str, module: Path) -> Iterator[tuple[str, int]]:
    """Absolute dotted names that `module` imports, with their lines."""
    package = ["streamrl", *module.parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield ".".join([*origin, alias.name]), node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((str(name), node.lineno) for name in names)


def _lies_in(module: Path, place: str) -> bool:
    return module.as_posix() == place or (place.endswith("/") and module.as_posix().startswith(place))


def allowed_floors(floor: str) -> set[str] | None:
    """Floors that `floor` may import besides itself; None: any."""
    if floor == "":
        return LOWER | COMPONENTS | {"api"}  # the public names
    if floor in GROUND:
        return GROUND
    if floor in ("transport", "stream_dataset"):
        return GROUND | {"transport"}
    if floor in COMPONENTS or floor == "report":
        return LOWER
    return None


def violations(source: str, module: Path) -> list[str]:
    """What `source`, as `module`, imports that it must not."""
    floor = floor_of(module)
    allowed = allowed_floors(floor)
    found = []
    for name, line in imported_names(source, module):
        first, _, rest = name.partition(".")
        if first in FORBIDDEN_EVERYWHERE:
            found.append(f"{module}:{line} imports {name}: nothing is pickled here")
        if first in ONLY_IN and not any(_lies_in(module, place) for place in ONLY_IN[first]):
            found.append(f"{module}:{line} imports {name}: only {', '.join(ONLY_IN[first])} may")
        if first == "streamrl" and allowed is not None:
            target = rest.partition(".")[0]
            is_module = (PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").is_file()
            if is_module and target not in allowed | {floor}:
                found.append(f"{module}:{line} imports streamrl.{target}, which is not below {floor or 'streamrl'}")
    return found


def test_imports_only_go_down() -> None:
    assert [wrong for module in modules() for wrong in violations((PACKAGE / module).read_text(), module)] == []


def dotted(module: Path) -> str:
    """The name under which `module` is imported."""
    parts = ["streamrl", *module.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle_among(sources: dict[Path, str]) -> list[str]:
    """Return one circle of imports among `sources`, first module also last; empty if there is none."""
    names = {dotted(module) for module in sources}

    def known(imported: Iterable[tuple[str, int]]) -> set[str]:
        """Names that are modules, or that a module has."""
        longest = ((name if name in names else name.rpartition(".")[0]) for name, _ in imported)
        return {name for name in longest if name in names}

    graph = {
        dotted(module): known(imported_names(source, module)) - {dotted(module)} for module, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circles() -> None:
    assert circle_among({module: (PACKAGE / module).read_text() for module in modules()}) == []


@pytest.mark.parametrize(
    "hidden",
    [
        "from streamrl.a import f",
        "from streamrl import a",
        "def g():\n    import streamrl.a",
        "if TYPE_CHECKING:\n    from streamrl.a import f",
    ],
)
def test_a_circle_is_seen_wherever_it_hides(hidden: str) -> None:
    sources = {Path("a.py"): "from streamrl.b import g", Path("b.py"): "import streamrl.c", Path("c.py"): hidden}
    assert set(circle_among(sources)) == {"streamrl.a", "streamrl.b", "streamrl.c"}
    assert circle_among({**sources, Path("c.py"): "import json"}) == []


def loads_code(source: str) -> list[str]:
    """Return the places in `source` that may run code that came with data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg in SAFE and ast.unparse(node.value) != str(SAFE[node.arg]):
            found.append(f"line {node.value.lineno}: write {node.arg}={SAFE[node.arg]}")
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", getattr(node, "name", None))
        if name in PICKLING:
            found.append(f"line {node.lineno}: {name} pickles")  # type: ignore[attr-defined]
    return found


def test_nothing_loads_code_with_data() -> None:
    found = {module: loads_code((PACKAGE / module).read_text()) for module in modules()}
    assert {module: places for module, places in found.items() if places} == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=unknown)",
        "load(path, trust_remote_code=True)",
        "dist.all_gather_object(found, own)",
        "socket.recv_pyobj()",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_each_way_to_load_code_is_seen(source: str) -> None:
    assert loads_code(source)


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("ledger.py", "from streamrl.transport import http", True),
        ("ledger.py", "def f():\n    import streamrl.rollout.worker", True),
        ("ledger.py", "from streamrl.types import SampleMeta", False),
        ("ledger.py", "from streamrl import transport", True),
        ("transport/http.py", "from streamrl.stream_dataset import StreamDataset", True),
        ("transport/http.py", "from . import control", False),
        ("gserver/manager.py", "from streamrl.trainer import publisher", True),
        ("gserver/manager.py", "from ..rollout import worker", True),
        ("gserver/manager.py", "from streamrl.transport.control.groups import Admit", False),
        ("gserver/manager.py", "from .weights import WeightUpdates", False),
        ("rollout/worker.py", "import streamrl.cli", True),
        ("trainer/backends/torch.py", "import megatron.core", True),
        ("trainer/backends/megatron/model.py", "import megatron.core", False),
        ("trainer/backends/megatron_tools.py", "import megatron.core", True),
        ("launch/local.py", "from streamrl.rollout import worker", False),
        ("launch/local.py", "import pickle", True),
        ("userland.py", "from multiprocessing import Queue", True),
        ("launch/local.py", "import importlib\nimportlib.import_module('pickle')", True),
    ],
)
def test_the_check_itself(module: str, source: str, wrong: bool) -> None:
    assert bool(violations(source, Path(module))) == wrong


def test_others_import_modules_that_exist() -> None:
    """Also those that no test imports; the type check does not look for missing modules there."""

    def exists(parts: list[str]) -> bool:
        path = PACKAGE.joinpath(*parts)
        return path.is_dir() or path.with_suffix(".py").is_file()

    missing = []
    for folder in ("benchmarks", "examples", "tests", "tools"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for name, line in imported_names(file.read_text(), Path("file.py")):
                package, *parts = name.split(".")
                if package == "streamrl" and not (exists(parts) or exists(parts[:-1])):
                    missing.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    assert missing == []


def test_every_module_was_looked_at() -> None:
    found = {module.as_posix() for module in modules()}
    assert {"errors.py", "transport/http.py", "gserver/manager/core.py"} <= found
    assert importlib.util.find_spec("streamrl") is not None


def test_every_package_that_is_always_installed_is_imported_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {"prometheus-client": "prometheus_client", "pyyaml": "yaml", "pyzmq": "zmq"}
    needed = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]} - {"tomli-w"}  # type: ignore[index]
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    unused = [name for name in needed if not re.search(rf"\b(import|from) {modules.get(name, name)}\b", source)]
    assert unused == []
