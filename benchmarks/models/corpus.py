"""Pairs (what a function says it does, how it does it) out of the Python source that every machine has: no download.

* The docstring is cut out of the source of its own function, so the answer is not part of the text that is searched.
* Whole modules are held out, and a docstring or a body that occurs twice (vendored copies, overloads, generated
  wrappers) is kept once, before the split: no held-out text is in the training set.
* Modules are read in the order of a hash of their name, and the split hashes the name as well: the same machine has the
  same corpus, and adding a package moves no module from one side to the other.
"""

import ast
import hashlib
import itertools
import os
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_DIRECTORIES = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib"})
MAXIMUM_MODULE_BYTES = 300_000  # generated tables and bindings: long to parse, nothing to learn
MINIMUM_WORDS = 4  # "Return self." describes every function and none
HELD_OUT_EVERY = 8  # one module in eight
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_a-zA-Z]+|\d+")  # CamelCase is two


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
    """The pairs of one module's source; none where it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code are not our business
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and len(node.body) > 1:
            docstring = (ast.get_docstring(node) or "").strip()
            words = re.split(r"\n\s*\n", docstring, maxsplit=1)[0].split()  # of the first paragraph
            if len(words) >= MINIMUM_WORDS:
                node.body = node.body[1:]
                yield Pair(name, " ".join(words), ast.unparse(node))


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


def tokens_of(texts: Sequence[str], length: int, vocabulary: int) -> Tensor:
    """The first ``length`` words of each text, hashed to int32 of shape (texts, length); 0 at the end is padding.

    Case, white space and punctuation are dropped, so that read_bytes, ReadBytes and "Read bytes" become the same words
    and a short sequence holds most of a function.
    """
    tokens = torch.zeros(len(texts), length, dtype=torch.int32)
    for row, text in zip(tokens, texts, strict=True):
        for k, match in enumerate(itertools.islice(WORD.finditer(text), length)):
            row[k] = 1 + zlib.crc32(match[0].lower().encode()) % (vocabulary - 1)
    return tokens
