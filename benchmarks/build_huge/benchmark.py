"""``build-huge``: builds, loads and trains a model whose parameters alone exceed the memory cap of its process.

Four cases train the same model from the same files, a step of each in a round. The resident one without a cap gives
the reference losses; the resident one under the cap fails; the offloaded one must train under the cap to these losses.
The fourth stores fewer bytes: it must train under the cap, with a loss that falls.
"""

from dataclasses import asdict

from benchmarks.build_huge.workload import Settings, write_weights
from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import FLOOR, Case, Outcome
from benchmarks.harness.io_counters import counted_bytes
from benchmarks.harness.table import at_most, case_table, mebibytes, spread

REFERENCE, CAPPED, OFFLOADED = "resident, no cap", "resident, capped", "offloaded, capped"
FEWER = "offloaded, fewer bytes, capped"
#: Most time of a step to that of the resident one without a cap.
MOST_TIMES = {OFFLOADED: 2.0, FEWER: 1.1}
ALLOCATOR = (
    "The resident model without a cap has the default allocator, which keeps freed blocks and is faster; under the cap "
    "freed blocks are returned. The kernel's count of bytes read and written (`/proc/self/io`) is to what the model "
    "counts of loads, gradients and updates."
)
FEWER_WORDS = (
    f"{FEWER.capitalize()}: weights in bfloat16, rounded stochastically, and states in 8 bits; no gradients: "
    "both offloaded cases update in backward."
)
TOLERANCE = 1e-5  # of a loss, relative to that of the resident model
COUNTS_DIFFER = 0.02  # the kernel's count of bytes and ours
#: glibc raises the size from which blocks are mapped, and then keeps what was freed in its heap, which the cap counts.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def measure(run: Run) -> None:
    """Runs the three cases as one group."""
    settings = run.settings
    stored = write_weights(run.folder / "weights", settings)
    run.facts |= {
        "model": f"{mebibytes(settings.parameter_bytes)} of float32 parameters in {settings.blocks} shards, AdamW",
        "weights": f"{mebibytes(stored)} of bfloat16 in {settings.blocks} safetensors files with an index",
        "cap": f"RLIMIT_DATA of {settings.cap:,} MiB, which counts heap, stacks and private mappings",
    }
    cases = []
    for name in (REFERENCE, CAPPED, OFFLOADED, FEWER):
        capped = name != REFERENCE
        how = {"offloaded": name in MOST_TIMES, "capped": capped, "settings": asdict(settings)}
        how |= {"fewer": True} if name == FEWER else {}
        environment = GIVE_BACK if capped else {}
        cases.append(Case(name, "benchmarks.build_huge.workload:train", how, environment))
    run.group("training", cases, "rounds", turns=settings.steps)


def report(run: Run) -> list[str]:
    """One table."""

    def phase(outcome: Outcome, name: str) -> str:
        return mebibytes(outcome.peaks[name]) if name in outcome.peaks else "-"

    columns = {
        "parameters": lambda o: mebibytes(run.settings.parameter_bytes),
        "cap": lambda o: mebibytes(run.settings.cap << 20) if o.name != REFERENCE else "none",
        "torch alone": lambda o: mebibytes(o.moments[FLOOR]),
        "peak, building": lambda o: phase(o, "build"),
        "peak, training": lambda o: phase(o, "steps"),
        "load": lambda o: f"{o.result['load_seconds']:.1f} s" if o.steps else "-",
        "s/step": lambda o: f"{o.median():.2f}" if o.steps else "-",
        "to no cap": lambda o: spread(o.ratios(), 2),
        "kernel's count": lambda o: f"{_kernel_to_ours(o):.3f}" if _counts(o) else "-",
        "losses": lambda o: _died(o) or ", ".join(f"{loss:.6f}" for loss in o.values("loss")),
    }
    words = [FEWER_WORDS] if any(outcome.name == FEWER for outcome in run.outcomes) else []
    return [case_table(run.outcomes, columns), ALLOCATOR, *words]


def _counts(outcome: Outcome) -> bool:
    """Whether its steps have moved bytes of homes."""
    return any(step.get("bytes_loaded") for step in outcome.steps)


def _kernel_to_ours(outcome: Outcome) -> float:
    """The kernel's count of the bytes of all steps to ours."""
    ours, kernel = (sum(each) for each in zip(*map(counted_bytes, outcome.steps), strict=True))
    return kernel / ours


def _died(outcome: Outcome) -> str:
    reason = outcome.result.get("out_of_memory")
    return f"out of memory: {reason}" if reason else ""


def bounds(run: Run) -> list[str]:
    """Under the cap only the offloaded models train, the exact one to the losses of the resident one; both in time."""
    reference, resident = run.find(REFERENCE), run.find(CAPPED)
    ours = [outcome for name in MOST_TIMES if (outcome := run.find(name)) is not None]
    broken = [f"{outcome.name}: {_died(outcome)}" for outcome in (reference, *ours) if _died(outcome)]
    if not _died(resident):
        broken.append("the resident model must not fit under the cap, but it trained")
    if _died(reference):
        return broken
    for outcome in ours:
        if not _died(outcome):
            broken += [f"{outcome.name}: {line}" for line in _broken_by(outcome, run.settings.cap << 20)]
            if outcome.name == OFFLOADED:
                pairs = zip(outcome.values("loss"), reference.values("loss"), strict=True)
                apart = max(abs(a - b) / abs(b) for a, b in pairs)
                what = "the difference of losses from the resident model's"
                broken += at_most(what, apart, TOLERANCE, "{:.1e}".format)
    return broken


def _broken_by(outcome: Outcome, cap_bytes: int) -> list[str]:
    """Of an offloaded case that trained: what does not hold of its bytes, its peak, its losses and its time."""
    broken: list[str] = []
    if _counts(outcome) and "read" in outcome.steps[0]:
        apart = abs(_kernel_to_ours(outcome) - 1)
        what = "the difference of the kernel's count of bytes from ours"
        broken += at_most(what, apart, COUNTS_DIFFER, "{:.1%}".format)
    broken += at_most("the peak under the cap", outcome.peak_bytes, cap_bytes, mebibytes)
    losses = outcome.values("loss")
    if len(losses) > 1 and not losses[-1] < losses[0]:
        broken.append(f"the loss must fall, went from {losses[0]:.6f} to {losses[-1]:.6f}")
    if outcome.reference:
        what = "the time of a step to the resident one's"
        broken += at_most(what, outcome.ratio(), MOST_TIMES[outcome.name], "{:.2f}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """The offloaded models under the cap beside the resident one without."""
    theirs, size = run.find(REFERENCE), mebibytes(run.settings.parameter_bytes)
    set_up = f"build, load and train {size} of parameters under a hard cap of {run.settings.cap} MiB"
    peer = "all in memory, no cap (dies under the cap)"
    set_ups = {OFFLOADED: (set_up, peer), FEWER: ("the same, bfloat16 weights, 8-bit states", "the same")}
    found = {words: run.find(name) for name, words in set_ups.items()}
    return [
        Claim(*words, ours.ratios(), ours.peak_bytes / theirs.peak_bytes)
        for words, ours in found.items()
        if ours is not None and not _died(ours)
    ]


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)
