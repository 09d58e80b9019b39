"""The corpus: no answer is in the text that is searched, no text is on both sides, the same tree gives the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.retrieval.corpus import Pair, build_corpus, find_modules, pairs_in

SOURCE = '''
@cached
def area(width, height):
    """Return the area of a rectangle, in square metres.

    Not for circles.
    """
    check(width)
    return width * height


class Shape:
    """A class docstring is not a pair."""

    async def move(self, distance):
        \'\'\'Move the shape along   its
        axis by a distance.\'\'\'
        self.position += distance
        return self.position

    def terse(self):
        """Too few words."""
        return 1

    def one_line(self): "A docstring on the line of its def."; return 1

    def outer(self):
        """Call a function that is defined inside of this one."""
        def inner():
            """This docstring is part of the source around it."""
            return 2
        return inner()

    def nothing_else(self):
        """This function has a docstring but no other statement."""
'''


def made_tree(root: Path, modules: int, offset: int = 0) -> Path:
    for k in range(offset, offset + modules):
        folder = root / f"package{k % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        text = f'def work{k}(x):\n    """Compute the value number {k} from its input."""\n    return x + {k}\n'
        (folder / f"module{k}.py").write_text(text)
    return root


def texts(pairs: tuple[Pair, ...]) -> set[str]:
    return {text for pair in pairs for text in (pair.description, pair.source)}


def test_the_docstring_is_cut_out_of_the_source() -> None:
    area = next(pairs_in("m", SOURCE))
    assert area.description == "Return the area of a rectangle, in square metres."
    assert area.source == "@cached\ndef area(width, height):\n    check(width)\n    return width * height"


def test_methods_are_pairs_and_short_odd_or_nested_docstrings_are_not() -> None:
    found = {pair.source.splitlines()[0].strip(): pair for pair in pairs_in("m", SOURCE)}
    assert list(found) == ["@cached", "async def move(self, distance):", "def outer(self):"]
    assert found["async def move(self, distance):"].description == "Move the shape along its axis by a distance."
    assert "This docstring is part of the source around it." in found["def outer(self):"].source


def test_no_module_and_no_text_is_on_both_sides(tmp_path: Path) -> None:
    root = made_tree(tmp_path, 60)
    for k in range(60):  # every text once more, in a module of another name: a vendored copy
        copy = root / "vendor" / f"copy{k}.py"
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((root / f"package{k % 3}" / f"module{k}.py").read_text())
    corpus = build_corpus([root])
    assert len(corpus.training) + len(corpus.held_out) == 60
    assert {pair.module for pair in corpus.training}.isdisjoint(pair.module for pair in corpus.held_out)
    assert texts(corpus.training).isdisjoint(texts(corpus.held_out))


def test_a_pair_that_shares_one_half_with_another_is_dropped(tmp_path: Path) -> None:
    for k in range(100):  # every description with every body, each in a module of its own
        text = f'def work():\n    """Describe the work with number {k % 10}."""\n    return {k // 10}\n'
        (tmp_path / f"module{k}.py").write_text(text)
    corpus = build_corpus([tmp_path])
    kept = (*corpus.training, *corpus.held_out)
    assert len(kept) <= 10
    assert len({pair.description for pair in kept}) == len({pair.source for pair in kept}) == len(kept)


def test_the_order_is_not_the_order_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, real = made_tree(tmp_path, 40), os.walk
    seen = build_corpus([root])

    def reversed_walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, folders, files in real(top):
            folders.sort(reverse=True)
            yield folder, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", reversed_walk)
    assert build_corpus([root]) == seen
    assert build_corpus([root]).fingerprint == seen.fingerprint
    names = [name for name, _ in find_modules([root])]
    assert names != sorted(names)


def test_reading_stops_when_there_are_enough_pairs(tmp_path: Path) -> None:
    corpus = build_corpus([made_tree(tmp_path, 60)], pairs=30)
    assert len(corpus.training) + len(corpus.held_out) == 30
    assert corpus.modules_read == 30
