"""``qwen-embedding``: contrastive training of an encoder of transformers under a cap that its training states exceed.

A round takes a step of each method. Under the cap run ours, the plain model, the cached loss of sentence-transformers
and DeepSpeed's ZeRO-3 with NVMe; the cached loss without a cap is the reference for losses and times. It is left out
where the machine has too little free memory, or with ``--capped-only``.

Parameters, gradients and two moments take 16 bytes a parameter: for the default sizes 9.5 GB. Those of the embedding,
a quarter of them, are on the compute device in ours as well; its blocks, their gradients and moments are in files.
"""

from dataclasses import asdict, dataclass

import psutil

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import FLOOR, Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes, spread
from benchmarks.qwen_embedding.workload import HEAD_CHANNELS, Model, write_model

OURS, REFERENCE = "ours", "sentence-transformers, no cap"
#: Method and environment of each case. Ours is no peer, but needs transformers.
CASES = {
    OURS: ("ours", "transformers"),
    "plain": ("plain", "transformers"),
    "sentence-transformers": ("sentence-transformers", "sentence-transformers"),
    "DeepSpeed ZeRO-3, NVMe": ("deepspeed", "deepspeed"),
    REFERENCE: ("sentence-transformers", "sentence-transformers"),
}
TOLERANCE = 1e-4  # of a loss, relative to that of the reference
STATE_BYTES = 16  # of a parameter: itself, its gradient, two moments
#: glibc raises the size from which blocks are mapped, and then keeps what was freed in its heap, which the cap counts.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


@dataclass(frozen=True)
class Settings:
    """The cap, the model, its batches, and the number of steps."""

    cap: int = option(6144, "MiB of private memory (RLIMIT_DATA) of the capped cases")
    memory: int = option(4608, "MiB that ours may use (memory=); the cap holds Python and its libraries as well")
    pairs: tuple[int, ...] = option((32, 256), "pairs of a batch")
    positions: int = option(64, "tokens of a row", least=2)
    chunk: int = option(8, "rows of a chunk, of the methods that cut a batch")
    steps: int = option(3, "steps of each method")
    blocks: int = option(28, "blocks of the model")
    width: int = option(1024, "channels of the model", least=64, multiple=64)
    vocabulary: int = option(151_669, "rows of the embedding")
    capped_only: bool = option(False, "leaves out the reference without a cap")

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: the training states have to exceed the cap."""
        if STATE_BYTES * self.model.parameters > self.cap << 20:
            return ""
        return (
            f"expected training states larger than the cap, got {mebibytes(STATE_BYTES * self.model.parameters)} under "
            f"a cap of {self.cap:,} MiB; pass a larger model or a smaller --cap"
        )

    @property
    def model(self) -> Model:
        """The sizes of the model."""
        return Model(self.blocks, self.width, self.vocabulary)


def measure(run: Run) -> None:
    """A group for each number of pairs."""
    settings, model = run.settings, run.settings.model
    stored = write_model(run.folder / "weights", model)
    states = STATE_BYTES * model.parameters
    heads = f"{model.heads} heads of {HEAD_CHANNELS}"
    run.facts |= {
        "model": f"{model.blocks} blocks, width {model.width:,}, {heads}, vocabulary {model.vocabulary:,}: "
        f"{model.parameters / 1e6:.0f} M parameters with random values, float32, {mebibytes(stored)} in files",
        "states": f"{mebibytes(states)} of parameters, gradients and moments of AdamW",
        "cap": f"RLIMIT_DATA of {settings.cap:,} MiB, which counts heap, stacks and private mappings",
    }
    names = [name for name in CASES if not (name == REFERENCE and settings.capped_only)]
    needed = states + (settings.cap << 20)  # beside ours, which is alive at the same time
    if REFERENCE in names and needed > psutil.virtual_memory().available:
        names.remove(REFERENCE)
        run.facts["reference"] = f"left out: {mebibytes(needed)} of free memory would be needed beside ours"
    how = {"model": asdict(model), "positions": settings.positions, "chunk": settings.chunk, "memory": settings.memory}
    for pairs in settings.pairs:
        cases = []
        for name in names:
            method, environment = CASES[name]
            cap = None if name == REFERENCE else settings.cap
            arguments = {"method": method, "pairs": pairs, "cap": cap, **how}
            given = GIVE_BACK if cap else {}
            cases.append(Case(name, "benchmarks.qwen_embedding.methods:train", arguments, given, environment))
        run.group(_group(pairs), cases, "rounds", turns=settings.steps)


def _group(pairs: int) -> str:
    return f"{pairs} pairs"


def _died(outcome: Outcome) -> str:
    reason = (outcome.result or {}).get("out_of_memory")
    return f"out of memory {reason}" if reason else ""


def _trained(outcome: Outcome | None) -> bool:
    return outcome is not None and bool(outcome.steps) and not _died(outcome)


def report(run: Run) -> list[str]:
    """A table for each number of pairs."""
    sections = []
    for group, outcomes in run.groups.items():
        found = {outcome.name: outcome for outcome in outcomes}

        def ours_to_it(outcome: Outcome, found: dict[str, Outcome] = found) -> list[float]:
            mine = found[OURS].values("seconds")
            return [a / b for a, b in zip(mine, outcome.values("seconds"), strict=False)]

        columns = {
            "cap": lambda o: "none" if o.name == REFERENCE else mebibytes(run.settings.cap << 20),
            "peak": lambda o: mebibytes(o.peak_bytes),
            "above the libraries": lambda o: mebibytes(o.peak_bytes - o.moments[FLOOR]),
            "built in": lambda o: f"{o.result['build_seconds']:.1f} s" if "build_seconds" in o.result else "-",
            "s/step": lambda o: f"{o.median():.2f}" if o.steps else "-",
            "ours to it": lambda o, ours_to_it=ours_to_it: spread(ours_to_it(o), 2) if o.steps else "-",
            "losses": lambda o: _died(o) or ", ".join(f"{loss:.5f}" for loss in o.values("loss")),
        }
        sections += [f"## {group}", case_table(outcomes, columns, "method")]
    return sections


def bounds(run: Run) -> list[str]:
    """Ours trains under the cap to the losses of the reference; others die, or take longer."""
    broken: list[str] = []
    for group, outcomes in run.groups.items():
        found = {outcome.name: outcome for outcome in outcomes}
        mine = found[OURS]
        if not _trained(mine):
            broken.append(f"{group}: ours must train under the cap: {_died(mine) or mine.reason or 'no step'}")
            continue
        broken += at_most(f"{group}: the peak of ours", mine.peak_bytes, run.settings.cap << 20, mebibytes)
        for name, outcome in found.items():
            if name == OURS or not _trained(outcome):
                continue
            if name != REFERENCE:
                broken += at_most(f"{group}: ours / {name}", mine.median() / outcome.median(), 1.0)
            apart = [abs(a - b) / abs(b) for a, b in zip(mine.values("loss"), outcome.values("loss"), strict=False)]
            what = f"{group}: the difference of losses from those of {name}"
            broken += at_most(what, max(apart), TOLERANCE, "{:.1e}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """Ours under the cap beside the reference without, for the largest batch that both trained."""
    for group, outcomes in reversed(run.groups.items()):
        found = {outcome.name: outcome for outcome in outcomes}
        mine, reference = found[OURS], found.get(REFERENCE)
        if _trained(mine) and reference is not None and _trained(reference):
            pairs = zip(mine.values("seconds"), reference.values("seconds"), strict=False)
            ratios = [a / b for a, b in pairs]
            set_up = (
                f"contrastive AdamW steps of Qwen3-Embedding-0.6B's {run.settings.model.parameters / 1e6:.0f} M "
                f"parameters, {group}, under a hard cap of {run.settings.cap:,} MiB"
            )
            peer = "cached loss of sentence-transformers, no cap (dies under the cap)"
            return [Claim(set_up, peer, ratios, mine.peak_bytes / reference.peak_bytes)]
    return []


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)
