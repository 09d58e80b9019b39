"""Mutation tests of waits: finds every wait and event in the engine's sources, and removes one of them.

A wait that no test misses will be removed one day. So tests hold a table with an entry for each, and run a
:class:`Scenario` of copies that are as late as they may be, once with all waits and once without that one. Only the
order is removed: receivers and arguments are still evaluated, and where the value of a wait is used a stand-in keeps
it. The scenario names its failure, so that a mutation that merely crashes proves nothing.

What counts is found in the syntax tree, by name:

===========  ==========================================================================================
kind         what, and what is left in its place
===========  ==========================================================================================
call         a call such as ``arrival.wait()`` or ``event.record(stream)``: its receiver and arguments; where
             its value is used, what the stand-in returns for them; a loop that it alone ends is removed
reference    ``event.synchronize`` handed on to be called later: something that returns at once
order        the arrivals that a copy is submitted ``after``: none
lock         ``with self._lock``: nothing is locked
===========  ==========================================================================================
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

__all__ = ["Scenario", "Site", "fails_with", "find_sites", "is_value_used", "take_out"]

ROOT = Path(__file__).parent.parent

#: Methods and functions that wait, or that make something to wait for.
CALLED = {
    *("wait", "finish", "result", "join", "acquire", "synchronize", "wait_event", "wait_stream", "fence", "_fence"),
    *("record", "record_event", "record_stream", "notify", "notify_all", "set", "query"),
    # What the engine builds of these.
    *("apply_pending_updates", "wait_for_home_reads", "wait_idle", "cancel", "complete"),
    *("_flush", "_finish", "_synchronize", "_wait_idle", "succeeded", "run_or_wait"),
}
#: Names that are handed on as something to call.
HANDED_ON = {"wait", "finish", "result", "synchronize"}
LOCKS = {"_lock", "_changed", "lock"}


@dataclass(frozen=True)
class Site:
    """One wait: where it is, and its text."""

    module: str
    #: The outermost function, as ``Class.method``.
    function: str
    kind: str
    text: str
    #: Counts equal ones in one function from 1.
    number: int = 1

    def __str__(self) -> str:
        again = f" #{self.number}" if self.number > 1 else ""
        return f"{self.module} {self.function}: {self.text}{again}"


def find_sites(paths: Iterable[str | Path]) -> list[Site]:
    """All sites in the modules under ``paths`` (files or folders, relative to the root of the project)."""
    files = [file for path in paths for file in (sorted((ROOT / path).rglob("*.py")) or [ROOT / path])]
    return [site for file in files for site, _, _ in _sites_in(file)]


def _sites_in(file: Path) -> Iterator[tuple[Site, ast.Module, list[ast.AST]]]:
    """Each site, its tree, and the way from the tree to the node."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    module = ".".join((file.relative_to(ROOT) if file.is_relative_to(ROOT) else file).with_suffix("").parts)
    seen: dict[tuple[str, str, str], int] = {}
    for way in _ways([tree]):
        found = _kind_of(way)
        if found is None:
            continue
        names = [node for node in way if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        outer = next((k for k, node in enumerate(names) if isinstance(node, ast.FunctionDef)), None)
        function = ".".join(node.name for node in names[: len(names) if outer is None else outer + 1])
        key = (function, *found)
        seen[key] = seen.get(key, 0) + 1
        yield Site(module, function, *found, seen[key]), tree, way


def _ways(way: list[ast.AST]) -> Iterator[list[ast.AST]]:
    for child in ast.iter_child_nodes(way[-1]):
        inner = [*way, child]
        yield inner
        yield from _ways(inner)


def _kind_of(way: list[ast.AST]) -> tuple[str, str] | None:
    node, parent = way[-1], way[-2]
    if isinstance(node, ast.Call):
        name = _name(node.func)
        if _order_of(node) is not None:
            return "order", ast.unparse(node)
        if name in CALLED and not _is_text_or_set(node):
            return "call", ast.unparse(node)
    elif isinstance(node, ast.Attribute) and node.attr in HANDED_ON:
        if not (isinstance(parent, ast.Call) and parent.func is node):
            return "reference", ast.unparse(node)
    elif isinstance(node, ast.withitem) and _name(node.context_expr) in LOCKS:
        return "lock", f"with {ast.unparse(node)}"
    return None


def _is_text_or_set(call: ast.Call) -> bool:
    """``", ".join(...)``, ``set(...)``, ``variable.set(value)`` do not wait; ``thread.join()``, ``event.set()`` do."""
    if isinstance(call.func, ast.Name):
        return call.func.id == "set"
    if not isinstance(call.func, ast.Attribute):
        return False
    return isinstance(call.func.value, ast.Constant) or (call.func.attr == "set" and bool(call.args))


def _name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _order_of(call: ast.Call) -> ast.keyword | int | None:
    """Where a call says what it comes after: as a keyword, or as the third argument of ``submit``."""
    for keyword in call.keywords:
        if keyword.arg == "after":
            return keyword
    return 2 if _name(call.func) == "submit" and len(call.args) == 3 else None


# --- scenarios ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A run in which copies are as late as they may be, and how it fails if they are not waited for."""

    run: Callable[..., None]
    #: Patterns of messages, one of which the failure has.
    messages: tuple[str, ...]
    errors: tuple[type[BaseException], ...]

    @property
    def __name__(self) -> str:
        return self.run.__name__

    def assert_passes(self, *arguments: object) -> None:
        """Runs it: the scenario asserts what it is named after."""
        self.run(*arguments)

    def assert_fails(self, *arguments: object) -> None:
        """Asserts that it fails as announced."""
        with pytest.raises(self.errors, match="|".join(self.messages)):
            self.run(*arguments)


def fails_with(
    *messages: str, error: type[BaseException] | tuple[type[BaseException], ...] = AssertionError
) -> Callable[[Callable[..., None]], Scenario]:
    """Decorates a scenario.

    Args:
        messages: patterns, one of which is found in the message of the failure without one of its waits.
        error: the type of that failure, or several.
    """
    assert all(messages), "a failure without a name proves nothing"
    return lambda run: Scenario(run, messages, error if isinstance(error, tuple) else (error,))


# --- taking one out -------------------------------------------------------------------------------------------------

#: The name of a stand-in, in the module whose wait is taken out.
STAND_IN = "_stand_in_for_a_wait"


def take_out(site: Site, monkeypatch: pytest.MonkeyPatch, stand_in: Callable[..., object] | None = None) -> None:
    """Runs the function that holds ``site`` without it from now on.

    Args:
        site: the wait.
        monkeypatch: puts it back.
        stand_in: called with the receiver (of a method) and the arguments of a call whose value is used; returns
            that value without waiting.
    """
    file, tree, way = _find(site)
    assert (stand_in is not None) == _is_value_used(site, way), f"{site}: a stand-in is for values that are used"
    _remove(way, site.kind)
    code = compile(ast.fix_missing_locations(tree), str(file), "exec")
    function = _function(site)
    found = _codes_in(code, function.__qualname__)
    assert found, f"{site}: no code of {function.__qualname__}"
    if stand_in is not None:
        monkeypatch.setitem(function.__globals__, STAND_IN, stand_in)
    monkeypatch.setattr(function, "__code__", found[-1])  # the last one: overloads come first


def is_value_used(site: Site) -> bool:
    """Whether the call is part of a larger expression, so that removing it asks for a stand-in."""
    return _is_value_used(site, _find(site)[2])


def _find(site: Site) -> tuple[Path, ast.Module, list[ast.AST]]:
    file = ROOT / Path(*site.module.split(".")).with_suffix(".py")
    tree, way = next((tree, way) for found, tree, way in _sites_in(file) if found == site)
    return file, tree, way


def _is_value_used(site: Site, way: list[ast.AST]) -> bool:
    return site.kind == "call" and not isinstance(way[-2], ast.Expr)


def _remove(way: list[ast.AST], kind: str) -> None:
    node, parent = way[-1], way[-2]
    if kind == "order":
        assert isinstance(node, ast.Call)
        place = _order_of(node)
        nothing = ast.Tuple(elts=[], ctx=ast.Load())
        if isinstance(place, ast.keyword):
            place.value = nothing
        else:
            node.args[2] = nothing
    elif kind == "lock":
        assert isinstance(node, ast.withitem)
        node.context_expr = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
    elif kind == "reference":
        _replace(parent, node, ast.parse("lambda *_: None", mode="eval").body)
    else:
        assert isinstance(node, ast.Call)
        operands = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        operands += [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(parent, ast.Expr) and isinstance(way[-3], ast.While) and way[-3].body == [parent]:
            _replace(way[-4], way[-3], ast.Pass())  # it would never end
        elif isinstance(parent, ast.Expr):
            parent.value = ast.Tuple(elts=operands, ctx=ast.Load())
        else:
            _replace(parent, node, ast.Call(ast.Name(STAND_IN, ast.Load()), operands, []))


def _replace(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list) and any(item is old for item in value):
            value[:] = [new if item is old else item for item in value]


def _function(site: Site) -> FunctionType:
    """The plain function, below whatever decorates it."""
    found: Any = importlib.import_module(site.module)
    for name in site.function.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, FunctionType), f"{site} is in no function"
    return found


def _codes_in(code: CodeType, qualname: str) -> list[CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [found for c in inner for found in ([c] if c.co_qualname == qualname else _codes_in(c, qualname))]
