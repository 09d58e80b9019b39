"""Pairs (what a function says it does, how it does it) out of the Python source that every machine has: no download.

* The docstring is cut out of the source of its own function, so the answer is not part of the text that is searched.
* Whole modules are held out, and a docstring or a body that occurs twice (vendored copies, overloads, generated
  wrappers) is kept once, before the split: no held-out text is in the training set.
* Modules are read in the order of a hash of their name, and the split hashes the name as well: the same machine has the
  same corpus, and adding a package moves no module from one side to the other.
"""

import ast
import hashlib
import json
import os
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib"})
MAXIMUM_MODULE_BYTES = 300_000  # generated tables and bindings: long to parse, nothing to learn
MINIMUM_WORDS = 4  # "Return self." describes every function and none
HELD_OUT_EVERY = 8  # one module in eight


@dataclass(frozen=True)
class Pair:
    """One function: the module it comes from, what it says, and its source without what it says."""

    module: str
    description: str
    source: str


@dataclass(frozen=True)
class Corpus:
    """Training and held-out pairs; their modules, descriptions and sources are disjoint."""

    training: tuple[Pair, ...]
    held_out: tuple[Pair, ...]
    modules_read: int

    @property
    def fingerprint(self) -> str:
        """A hash of every text in order: what a cache of anything derived from the corpus is keyed by."""
        # As JSON, in which ("ab", "c") is not ("a", "bc").
        sides = [[(pair.description, pair.source) for pair in side] for side in (self.training, self.held_out)]
        return hashlib.sha256(json.dumps(sides).encode()).hexdigest()


def default_roots() -> list[Path]:
    """The standard library first, then the folders that packages are installed in."""
    paths = sysconfig.get_paths()
    roots = dict.fromkeys(Path(paths[key]) for key in ("stdlib", "purelib", "platlib"))
    return [root for root in roots if root.is_dir()]


def find_modules(roots: Iterable[Path]) -> list[tuple[str, Path]]:
    """Dotted name and file of every module below ``roots``, root by root, in the order of a hash of the name."""
    modules: list[tuple[str, Path]] = []
    for root in roots:
        found = []
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in SKIPPED_DIRECTORIES and not name.startswith(".")]
            for file in files:
                if file.endswith(".py"):
                    path = Path(folder, file)
                    if path.stat().st_size <= MAXIMUM_MODULE_BYTES:
                        found.append((".".join(path.relative_to(root).with_suffix("").parts), path))
        modules += sorted(found, key=lambda module: (_hash(module[0]), module))
    return modules


def pairs_in(name: str, text: str) -> Iterator[Pair]:
    """The pairs of one module's source, in the order they are written; none where it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code are not our business
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = text.split("\n")  # the parser's lines: str.splitlines() also cuts at form feeds
    for node in _functions(tree):
        docstring = (ast.get_docstring(node) or "").strip()
        words = re.split(r"\n\s*\n", docstring, maxsplit=1)[0].split()  # of the first paragraph
        if len(words) < MINIMUM_WORDS or len(node.body) == 1:
            continue
        source = _source_without_docstring(node, lines)
        if source is not None:
            yield Pair(name, " ".join(words), source)


def build_corpus(roots: Iterable[Path] | None = None, *, pairs: int = 12_000) -> Corpus:
    """Reads modules below ``roots`` (default: :func:`default_roots`) until ``pairs`` different pairs are found.

    Raises:
        ValueError: if one side of the split by module stays empty.
    """
    seen: set[str] = set()
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    read = 0
    for name, path in find_modules(default_roots() if roots is None else roots):
        if len(sides[0]) + len(sides[1]) >= pairs:
            break
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        read += 1
        side = sides[_hash("split " + name) % HELD_OUT_EVERY == 0]
        for pair in pairs_in(name, text):
            keys = {"description " + _normalised(pair.description), "source " + _normalised(pair.source)}
            if seen.isdisjoint(keys):
                side.append(pair)
                seen |= keys
    training, held_out = sides
    if not training or not held_out:
        raise ValueError(
            f"expected functions with docstrings for training and for held-out modules, got {len(training)} and "
            f"{len(held_out)} pairs out of {read} modules; name roots with more Python source"
        )
    return Corpus(tuple(training), tuple(held_out), read)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def _normalised(text: str) -> str:
    return " ".join(text.lower().split())


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, but not the functions inside a function: those are part of its source."""
    pending: list[ast.stmt] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        elif isinstance(node, ast.ClassDef):
            pending.extend(reversed(node.body))


def _source_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str | None:
    """The lines of a function, decorators included, less those of its docstring; None where they cannot be told."""
    docstring, first = node.body[0], node.body[1]
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    if docstring.end_lineno is None or node.end_lineno is None or node.end_lineno > len(lines):
        return None
    if docstring.lineno == node.lineno or first.lineno == docstring.end_lineno:
        return None  # written on one line with something else: cutting lines would cut too much or too little
    kept = lines[start - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    return textwrap.dedent("\n".join(kept)).strip()
