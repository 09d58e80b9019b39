"""Three floors, each standing only on the ones below; and a tree that a stranger can find their way in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ["pipe", "offload", "gradcache"]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(top-level package, line) of every import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield (node.module or "").split(".")[0], node.lineno


@pytest.mark.parametrize("floor", FLOORS)
def test_no_floor_imports_one_above_it(floor: str) -> None:
    above = set(FLOORS[FLOORS.index(floor) + 1 :]) | {"benchmarks", "tests"}
    wrong = [
        f"{path}:{line} imports {name}" for path in modules(floor) for name, line in imports(path) if name in above
    ]
    assert not wrong


@pytest.mark.parametrize("floor", FLOORS)
def test_every_module_says_what_it_is_for(floor: str) -> None:
    for path in modules(floor):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_tests_mirror_the_packages() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert folders >= {*FLOORS, "benchmarks"}


def test_the_test_of_directions_sees_an_import_in_a_function(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "def f():\n    from gradcache.loss import x\n    import offload.planning.plan as p\n", encoding="utf-8"
    )
    assert sorted(imports(path)) == [("gradcache", 2), ("offload", 3)]
