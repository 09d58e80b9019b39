"""Three floors, each standing only on the ones below; and a tree that a stranger can find their way in."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ["pipe", "offload", "gradcache"]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def names_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """(full name, line) of what is imported."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((package + alias.name, node.lineno) for alias in node.names)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(top-level package, line) of every import in a file, wherever it stands."""
    return ((name.split(".")[0], line) for name, line in names_in(ast.walk(tree_of(path))))


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


def imported_parts(path: Path, root: Path) -> Iterator[str]:
    """The other parts of a package that a file imports at run time; ``__init__``: what the package exports."""
    for name, _ in names_in(at_run_time(tree_of(path).body)):
        top, *rest = name.split(".")
        if top == root.name:
            is_part = rest and ((root / rest[0]).is_dir() or (root / f"{rest[0]}.py").exists())
            yield rest[0] if is_part else "__init__"


@pytest.mark.parametrize("floor", FLOORS)
def test_parts_of_a_package_stand_on_one_another_in_one_order(floor: str) -> None:
    """Modules and folders; a folder counts as one."""
    root, graph = ROOT / floor, dict[str, set[str]]()
    for path in modules(floor):
        part = part_of(path, root)
        graph.setdefault(part, set()).update({*imported_parts(path, root)} - {part})
    assert len(graph) > 5
    assert {*graphlib.TopologicalSorter(graph).static_order()} == {*graph}


def imported_modules(path: Path, names: Collection[str]) -> set[str]:
    """The modules of this project that a file imports anywhere, also for types only."""
    found = {name for name, _ in names_in(ast.walk(tree_of(path)))}
    return {name if name in names else name.rpartition(".")[0] for name in found} & set(names)


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
    "offload/telemetry/memory_report.py": {"matplotlib"},
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
