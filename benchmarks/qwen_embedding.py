"""``qwen-embedding``: contrastive training of an encoder of transformers under a cap that its training states exceed.

A round takes a step of each method. Under the cap run ours, the plain model, the cached loss of sentence-transformers
and DeepSpeed's ZeRO-3 with NVMe; the cached loss without a cap is the reference for losses and times. It is left out
where the machine has too little free memory, or with ``--capped-only``. All read the same weights, compute the same
loss and update with AdamW in float32; ``plain`` and DeepSpeed use the model's own gradient checkpointing.

Parameters, gradients and two moments take 16 bytes a parameter: for the default sizes 9.5 GB. Those of the embedding,
a quarter of them, are on the compute device in ours as well; its blocks, their gradients and moments are in files.
"""

import importlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import FLOOR, Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes, spread
from benchmarks.harness.worker import Reporter
from benchmarks.models.contrastive import SENTENCE_TRANSFORMERS, Qwen, contrastive_loss
from benchmarks.models.deepspeed import deepspeed_nvme, start_deepspeed
from benchmarks.models.methods import DISK, METHODS, NVME, RESIDENT, Method, train_capped
from benchmarks.models.qwen3 import Qwen3, token_pairs, transformers

OURS, REFERENCE = "ours", "sentence-transformers, no cap"
#: Method and environment of each case. Ours is no peer, but needs transformers.
CASES = {
    OURS: (DISK, "transformers"),
    "plain": (RESIDENT, "transformers"),
    SENTENCE_TRANSFORMERS: (SENTENCE_TRANSFORMERS, "sentence-transformers"),
    "DeepSpeed ZeRO-3, NVMe": (NVME, "deepspeed"),
    REFERENCE: (SENTENCE_TRANSFORMERS, "sentence-transformers"),
}
TOLERANCE = 1e-4  # of a loss, relative to that of the reference
STATE_BYTES = 16  # of a parameter: itself, its gradient, two moments
#: glibc raises the size from which blocks are mapped, and then keeps what was freed in its heap, which the cap counts.
WEIGHTS = Path("weights")  # a case works in the folder of the run
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
    def model(self) -> Qwen3:
        """The sizes of the model."""
        heads = max(1, self.width // 64)
        return Qwen3(self.width, self.blocks, 3 * self.width, heads, max(1, heads // 2), 128, self.vocabulary)


def measure(run: Run) -> None:
    """A group for each number of pairs."""
    settings, model = run.settings, run.settings.model
    stored = model.write(run.folder / WEIGHTS)
    states = STATE_BYTES * model.parameters
    heads = f"{model.num_attention_heads} heads of {model.head_dim}"
    run.facts |= {
        "model": f"{settings.blocks} blocks, width {settings.width:,}, {heads}, vocabulary {settings.vocabulary:,}: "
        f"{model.parameters / 1e6:.0f} M parameters with random values, float32, {mebibytes(stored)} in files",
        "states": f"{mebibytes(states)} of parameters, gradients and moments of AdamW",
        "cap": f"RLIMIT_DATA of {settings.cap:,} MiB, which counts heap, stacks and private mappings",
    }
    names = [name for name in CASES if not (name == REFERENCE and settings.capped_only)]
    needed = states + (settings.cap << 20)  # beside ours, which is alive at the same time
    if REFERENCE in names and needed > psutil.virtual_memory().available:
        names.remove(REFERENCE)
        run.facts["reference"] = f"left out: {mebibytes(needed)} of free memory would be needed beside ours"
    how = {"vocabulary": settings.vocabulary, "memory": settings.memory << 20}
    for pairs in settings.pairs:
        cases = []
        for name in names:
            method, environment = CASES[name]
            cap = None if name == REFERENCE else settings.cap
            training = {"rows": pairs, "positions": settings.positions, "chunk": settings.chunk}
            arguments = {"method": method, "training": training, "cap": cap, **how}
            given = GIVE_BACK if cap else {}
            cases.append(Case(name, "benchmarks.qwen_embedding:train", arguments, given, environment))
        run.group(f"{pairs} pairs", cases, "rounds", turns=settings.steps)


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

        columns = {
            "cap": lambda o: "none" if o.name == REFERENCE else mebibytes(run.settings.cap << 20),
            "peak": lambda o: mebibytes(o.peak_bytes),
            "above the libraries": lambda o: mebibytes(o.peak_bytes - o.moments[FLOOR]),
            "built in": lambda o: f"{o.result['build_seconds']:.1f} s" if "build_seconds" in o.result else "-",
            "s/step": lambda o: f"{o.median():.2f}" if o.steps else "-",
            "ours to it": lambda o, mine=found[OURS]: spread(mine.ratios_to(o), 2) if o.steps else "-",
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
            what = f"{group}: the difference of losses from those of {name}"
            broken += at_most(what, mine.differ(outcome), TOLERANCE, "{:.1e}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """Ours under the cap beside the reference without, for the largest batch that both trained."""
    for group, outcomes in reversed(run.groups.items()):
        found = {outcome.name: outcome for outcome in outcomes}
        mine, reference = found[OURS], found.get(REFERENCE)
        if _trained(mine) and reference is not None and _trained(reference):
            set_up = (
                f"contrastive AdamW steps of Qwen3-Embedding-0.6B's {run.settings.model.parameters / 1e6:.0f} M "
                f"parameters, {group}, under a hard cap of {run.settings.cap:,} MiB"
            )
            peer = "cached loss of sentence-transformers, no cap (dies under the cap)"
            return [Claim(set_up, peer, mine.ratios_to(reference), mine.peak_bytes / reference.peak_bytes)]
    return []


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)

# --- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoder(Qwen):
    """The encoder whose weights are in files."""

    vocabulary: int = 0

    def build(self) -> nn.Module:
        """In memory."""
        model: nn.Module = transformers().AutoModel.from_pretrained(WEIGHTS, dtype=torch.float32)
        return model.train()

    def offloaded(self, where: Path | str, *, meta: bool, **how: Any) -> Any:
        """Blocks, gradients and moments in files."""
        from offload import OffloadModel

        kind = {"model": transformers().AutoModel, "blocks": self.path, "dtype": torch.float32}
        return OffloadModel.from_pretrained(WEIGHTS, self.device, where, **kind, **how).train()

    def example(self, step: int) -> tuple[Tensor, ...]:
        """Random tokens."""
        return token_pairs(self.vocabulary, self.rows, self.positions, step)


def deepspeed(training: Encoder, home: Path) -> Method:
    """ZeRO-3 of one process with parameters and optimizer on NVMe, in fp32, the batch in one piece."""
    theirs = start_deepspeed()
    home.mkdir(exist_ok=True)
    config = transformers().AutoConfig.from_pretrained(WEIGHTS)
    largest = config.vocab_size * config.hidden_size
    block = Qwen3(config.hidden_size, 1, config.intermediate_size, config.num_attention_heads).block_parameters
    # The fewest buffers that train, each as large as the embedding; so a parameter lives for one layer only.
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": training.learning_rate, "weight_decay": training.weight_decay}},
        **deepspeed_nvme(home, buffers=4, largest=largest, block=block, live=1),
    }
    # While this object lives, from_pretrained builds and reads parameters in parts.
    kept = importlib.import_module("transformers.integrations").HfDeepSpeedConfig(settings)
    model = training.recomputed(training.build())
    engine, *_ = theirs.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(queries: Tensor, passages: Tensor, kept: object = kept) -> Tensor:
        # One forward of both sides: an engine takes one between its backwards.
        states = training.encode(engine, torch.cat([queries, passages]))
        loss = contrastive_loss(*states.chunk(2))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Method(step)


def train(
    report: Reporter, method: str, training: dict[str, Any], vocabulary: int, memory: int, cap: int | None
) -> dict[str, Any]:
    """Builds a method and takes a step in each turn; ``cap``: MiB that end it, ``memory``: bytes of ours."""
    transformers()  # it imports the class of the model later
    warnings.filterwarnings("ignore", category=FutureWarning)
    sizes = {"blocks": 0, "dim": 0, "learning_rate": 1e-5, "max_norm": None, "waits": True}
    chosen = Encoder(**sizes, **training, way=method, vocabulary=vocabulary)

    def make(home: Path) -> Method:
        if method == NVME:
            return deepspeed(chosen, home)
        how = {"memory": memory} if method == DISK else {"checkpointed": method == RESIDENT}
        function, options = METHODS[DISK if method == DISK else RESIDENT]
        return function(chosen, home, None, **options, **how)

    return train_capped(report, make, chosen.example, cap)
