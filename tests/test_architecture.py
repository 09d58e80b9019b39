"""Three floors, each standing only on the ones below; and a tree that a stranger can find their way in."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ["pipe", "offload", "gradcache"]

#: The parts of each package, modules and folders, from bottom to top: at run time each imports only parts before it.
#: A new module is added to the list, at the place that its imports and its users leave to it.
ORDERS = {
    "pipe": [
        "torch_private",
        "nested",
        "process",
        "freed",
        "threads",
        "phony",
        "stream",
        "schedule",
        "loss",
        "interception",
        "gradients",
        "microbatch",
        "dependency",
        "copy",
        "turn",
        "skip",
        "recompute",
        "balance",
        "batchnorm",
        "checkpoint",
        "refusals",
        "stage",
        "placement",
        "pipeline",
        "step",
        "pipe",
        "__init__",
        "train",
    ],
    "offload": [
        "identities",
        "progress",
        "machine",
        "storage",
        "planning",
        "policy",
        "limits",
        "telemetry",
        "streaming",
        "mesh",
        "engine",
        "optim",
        "files",
        "arguments",
        "memory",
        "persistence",
        "module",
        "reports",
        "loading",
        "running",
        "blocks",
        "construction",
        "model",
        "advise",
        "embedding",
        "__init__",
    ],
    "gradcache": [
        "autograd_node",
        "used_modules",
        "accumulation",
        "jax",
        "chunks",
        "representations",
        "distributed",
        "two_pass",
        "context_managers",
        "contract",
        "streamed",
        "loss",
        "functional",
        "chunk_size",
        "wrapped",
        "step",
        "grad_cache",
        "__init__",
        "sentence_transformers",
    ],
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(top-level package, line) of every import in a file, wherever it stands."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield (node.module or "").split(".")[0], node.lineno


def at_run_time(body: Sequence[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports in these statements, functions included, but for those under ``if TYPE_CHECKING``."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from at_run_time(node.orelse)
        else:
            yield from at_run_time([*ast.iter_child_nodes(node)])


def part_of(path: Path, root: Path) -> str:
    """The module or folder of a package that a file belongs to."""
    return path.relative_to(root).with_suffix("").parts[0]


def upward_imports(root: Path, order: Sequence[str]) -> Iterator[str]:
    """Imports of a part that the one importing it does not stand on."""
    package = root.name
    for path in sorted(root.rglob("*.py")):
        allowed = order[: order.index(part_of(path, root)) + 1]
        for node in at_run_time(tree_of(path).body):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif node.module == package:  # from package import part, or what the package exports
                names = [f"{package}.{alias.name if alias.name in order else '__init__'}" for alias in node.names]
            else:
                names = [node.module or ""]
            for name in names:
                top, *rest = name.split(".")
                if top == package and (rest or ["__init__"])[0] not in allowed:
                    yield f"{path.relative_to(root.parent)}:{node.lineno} imports {name}"


@pytest.mark.parametrize("floor", FLOORS)
def test_parts_of_a_package_import_only_parts_below_them(floor: str) -> None:
    order = ORDERS[floor]
    assert {part_of(path, ROOT / floor) for path in modules(floor)} == set(order)
    assert not [*upward_imports(ROOT / floor, order)]


def imported_modules(path: Path, names: Collection[str]) -> set[str]:
    """The modules of this project that a file imports anywhere, also for types only."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= parts & set(names) or {node.module or ""}
    return found & set(names)


def test_no_module_imports_itself_over_others_even_for_types() -> None:
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for floor in FLOORS
        for path in modules(floor)
    }
    graph = {name: imported_modules(path, paths) - {name} for name, path in paths.items()}
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) == len(paths)


@pytest.mark.parametrize("floor", FLOORS)
def test_no_floor_imports_one_above_it(floor: str) -> None:
    above = set(FLOORS[FLOORS.index(floor) + 1 :]) | {"benchmarks", "tests"}
    wrong = [
        f"{path}:{line} imports {name}" for path in modules(floor) for name, line in imports(path) if name in above
    ]
    assert not wrong


#: Imported, in functions, by what is of use only with these packages; torch's exchange with NumPy, if that is imported.
OPTIONAL = {
    "gradcache/jax.py": {"jax"},
    "offload/files/checkpoint.py": {"from_numpy", "numpy"},
}


def test_packages_run_with_torch_and_psutil_alone() -> None:
    """As ``install_requires`` says. Torch does not require NumPy, but its conversions from and to NumPy do."""
    for path in [path for floor in FLOORS for path in modules(floor)]:
        tree = tree_of(path)
        others = {name for name, _ in imports(path)} - sys.stdlib_module_names - {*FLOORS, "torch", "psutil"}
        exchanges = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {"from_numpy", "numpy"}
        assert others | exchanges == OPTIONAL.get(str(path.relative_to(ROOT)), set()), path


def test_tests_mirror_the_packages() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert folders >= {*FLOORS, "benchmarks"}
