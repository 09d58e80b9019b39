"""``build-huge``: builds, loads and trains a model whose parameters alone exceed the memory cap of its process.

Four cases train the same model from the same files, a step of each in a round. The resident one without a cap gives
the reference losses; the resident one under the cap fails; the offloaded one must train under the cap to these losses.
The fourth stores fewer bytes: it must train under the cap, with a loss that falls.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import FLOOR, Case, Outcome
from benchmarks.harness.io_counters import counted_bytes
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes, spread
from benchmarks.harness.worker import Reporter
from benchmarks.models.checkpoint import write_checkpoint
from benchmarks.models.methods import Method, Training, ours, resident, train_capped
from offload import load_pretrained

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
WEIGHTS = Path("weights")  # a case works in the folder of the run
TOLERANCE = 1e-5  # of a loss, relative to that of the resident model
COUNTS_DIFFER = 0.02  # the kernel's count of bytes and ours
#: glibc raises the size from which blocks are mapped, and then keeps what was freed in its heap, which the cap counts.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


@dataclass(frozen=True)
class Settings:
    """The cap, the model (residual blocks of about ``8 * dim ** 2`` parameters each), and its batch."""

    cap: int = option(768, "MiB of private memory (RLIMIT_DATA) of the capped cases")
    dim: int = option(1024, "channels; a block has 8 dim^2 parameters")
    blocks: int = option(36, "blocks, each of which is one shard")
    rows: int = option(64, "rows of the batch")
    steps: int = option(9, "steps of AdamW")
    memory: int = option(0, "MiB for which the offloaded model plans; 0: it plans nothing", least=0)

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: the model has to exceed the cap."""
        if not sys.platform.startswith("linux"):
            return f"expected Linux, whose RLIMIT_DATA counts mappings too, got {sys.platform}"
        if self.parameter_bytes > self.cap << 20:
            return ""
        return (
            f"expected parameters larger than the cap, got {mebibytes(self.parameter_bytes)} under a cap of "
            f"{self.cap:,} MiB; pass more --blocks or a smaller --cap"
        )

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, in float32."""
        return 4 * self.blocks * (8 * self.dim**2 + 7 * self.dim)


def measure(run: Run) -> None:
    """Runs the three cases as one group."""
    settings = run.settings
    stored = write_weights(run.folder / WEIGHTS, settings)
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
        cases.append(Case(name, "benchmarks.build_huge:train", how, environment))
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
        # Older records say that it was loaded.
        "load": lambda o: f"{o.result.get('build_seconds') or o.result['load_seconds']:.1f} s" if o.steps else "-",
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
                what = "the difference of losses from the resident model's"
                broken += at_most(what, outcome.differ(reference), TOLERANCE, "{:.1e}".format)
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

# --- cases -----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two matrices around a nonlinearity, and a residual connection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, dim)`` to the same."""
        down: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + down


def layers(blocks: int, dim: int) -> nn.Sequential:
    """The model on the meta device: shapes and no values."""
    with torch.device("meta"):
        return nn.Sequential(*(Residual(dim) for _ in range(blocks)))


def write_weights(folder: Path, settings: Settings) -> int:
    """Writes bfloat16 weights, a block at a time; returns the tensors' bytes."""

    def drawn(k: int, block: nn.Module) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(k)
        tensors = {}
        for name, like in block.state_dict().items():
            scale = 0.3 / like.shape[-1] ** 0.5 if like.dim() > 1 else 0.0
            value = torch.randn(like.shape, generator=generator) * scale + (name == "norm.weight")
            tensors[f"{k}.{name}"] = value.bfloat16()
        return tensors

    folder.mkdir()
    return write_checkpoint(
        folder, (drawn(*each) for each in enumerate(layers(settings.blocks, settings.dim))), settings.blocks
    )


@dataclass(frozen=True)
class Huge(Training):
    """The model from its files, and one batch."""

    def build(self) -> nn.Module:
        """In memory; on the meta device it has no values yet."""
        model = layers(self.blocks, self.dim)
        if not torch.empty(0).is_meta:
            load_pretrained(model.to_empty(device="cpu"), WEIGHTS)
        return model

    def example(self, step: int) -> tuple[Tensor, ...]:
        """Rows, and what they should become; the same in each step."""
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(self.rows, self.dim, generator=generator) for _ in range(2))

    def loss(self, model: nn.Module, value: Tensor, target: Tensor) -> Tensor:
        """The mean squared distance."""
        return (model(value) - target).square().mean()


def train(
    report: Reporter, settings: dict[str, Any], offloaded: bool, capped: bool, fewer: bool = False
) -> dict[str, Any]:
    """Builds the model, loads it from its files, and takes a step in each turn; memory may end it at any time."""
    chosen = Settings(**settings)
    training = Huge(chosen.blocks, chosen.dim, chosen.rows, 1, learning_rate=3e-4, max_norm=None, waits=True)

    def make(home: Path) -> Method:
        if not offloaded:
            return resident(training, home, None, checkpointed=False)
        how: dict[str, Any] = {"pretrained": WEIGHTS, "store_dtype": torch.bfloat16 if fewer else None}
        how |= {"memory": chosen.memory << 20} if chosen.memory else {}
        # Nothing is clipped: gradients need not be stored, and the weights are in their slot.
        updates = {"update_in_backward": True, "states": "8bit" if fewer else None}
        home = home.with_name("home-fewer" if fewer else "home")
        return ours(training, home, None, meta=True, updates=updates, **how)

    return train_capped(report, make, training.example, chosen.cap if capped else None)
