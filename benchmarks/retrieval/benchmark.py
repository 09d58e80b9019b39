"""``retrieval``: trains a text encoder on a contrastive batch that does not fit, in less memory, to the same losses.

Three methods from one seed, a step of each in a round: the whole batch in memory; GradCache in memory; GradCache over
an OffloadModel on disk. Then the same three under a hard memory cap, midway between what the last one needed and the
least that the others did: there only the last one trains.

Every case has a cap, so that one that does not fit ends with an error of its own; without another it is what the
machine has left.
"""

from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.benchmark import Benchmark, Facts, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.memory_cap import available_bytes
from benchmarks.harness.schedule import Group
from benchmarks.retrieval.corpus import build_corpus
from benchmarks.retrieval.report import NAMES, midway, report
from benchmarks.retrieval.workload import METHODS, OURS, Settings, write_tokens

# Freed blocks are returned at once, in every case: else peaks and cap would depend on what each heap keeps.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_ARENA_MAX": "1"}


def plan(settings: Settings, folder: str) -> Plan:
    """The groups: free, and capped if a cap can be named."""

    def case(method: str, suffix: str, cap_bytes: int) -> Case:
        home = f"{folder}/{method}{suffix}".replace(", ", "-")
        how = {"method": method, "settings": asdict(settings), "tokens": f"{folder}/tokens.npz", "home": home}
        how |= {"cap_bytes": cap_bytes, "evaluate": not suffix}
        return Case(NAMES[method] + suffix, "benchmarks.retrieval.methods:train", how, GIVE_BACK)

    available = available_bytes()
    cases = [case(method, "", available) for method in settings.methods]
    free = yield Group("free", cases, "rounds", settings.training_steps)
    cap_bytes = midway(free)
    if settings.capped_steps and cap_bytes is not None:
        methods = [method for method in METHODS if method == OURS or method in settings.methods]
        capped = [case(method, ", capped", cap_bytes) for method in methods]
        yield Group("capped", capped, turns=min(settings.capped_steps, settings.training_steps))


def prepare(settings: Settings, folder: Path) -> Facts:
    """Builds the corpus and encodes it."""
    corpus = build_corpus(pairs=settings.pairs)
    write_tokens(corpus, settings, folder / "tokens.npz")
    words = (
        f"{len(corpus.training):,} pairs to train on, {len(corpus.held_out):,} from held-out modules, "
        f"{corpus.modules_read:,} modules"
    )
    return [("corpus", words)]


BENCHMARK = Benchmark(Settings, plan, report, prepare)
