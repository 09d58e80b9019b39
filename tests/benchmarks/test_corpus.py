"""The corpus: no answer is in the text that is searched, no text is on both sides, the same tree gives the same."""

from __future__ import annotations

from pathlib import Path

from benchmarks.models.corpus import Pair, build_corpus


def made_tree(root: Path, modules: int, offset: int = 0) -> Path:
    for k in range(offset, offset + modules):
        folder = root / f"package{k % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        text = f'def work{k}(x):\n    """Compute the value number {k} from its input."""\n    return x + {k}\n'
        (folder / f"module{k}.py").write_text(text)
    return root


def texts(pairs: tuple[Pair, ...]) -> set[str]:
    return {text for pair in pairs for text in (pair.description, pair.source)}


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
