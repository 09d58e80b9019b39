"""The documentation's site: every public name has its place in the reference, and docstrings become Markdown."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.examples import DOCS, load_script

ROOT = Path(__file__).parent.parent
PUBLIC = [
    "offload/__init__.py",
    "gradcache/__init__.py",
    "gradcache/functional.py",
    "gradcache/jax.py",
    "pipe/__init__.py",
    "pipe/balance/__init__.py",
    "pipe/skip/__init__.py",
    "pipe/train/__init__.py",
]


def public_names(module: str) -> list[str]:
    """What ``__all__`` lists, with the package's name in front; nothing is imported, since some need extras."""
    package = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return [f"{package}.{name}" for name in ast.literal_eval(node.value)]
    raise AssertionError(f"{module} has no __all__")


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name(module: str) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    documented = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    assert [name for name in public_names(module) if name not in documented] == []


def test_the_navigation_has_every_page() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md\b", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages - listed <= {f"results/{page.name}" for page in (DOCS / "results").glob("*.md")}
    assert [page for page in sorted(listed) if not (DOCS / page).is_file()] == []


def test_roles_become_code_and_literal_blocks_are_fenced() -> None:
    pytest.importorskip("griffe", reason="needs the extra docs")
    module = load_script(DOCS / "tools" / "docstrings.py")
    roles = "a :class:`~offload.OffloadModel`, :mod:`pipe.turn`, :meth:`OffloadModel.trace <offload.trace>`, ``plain``"
    assert module.without_roles(roles) == "a `OffloadModel`, `pipe.turn`, `OffloadModel.trace`, ``plain``"
    text = "Usage::\n\n    x = 1\n\n    y = 2\n\n::\n\n    a -> b\n\nThe end."
    expected = "Usage:\n\n```python\nx = 1\n\ny = 2\n```\n\n```text\na -> b\n```\n\nThe end."
    assert module.fenced(text) == expected
