"""``optimizer``: AdamW steps with clipping while parameters, gradients and moments are stored on disk.

Ours trains the same model in turn with the resident, checkpointed model under torch's fused AdamW. What is left in the
kernel's page cache is written out before the next turn; the table shows how long that takes. Ours spends a part of the
memory that it saves on graphs that are not recomputed.

With ``--parameters 1e9`` nothing is resident: ours trains a model whose parameters, gradients and moments are larger
than its memory, in turn with DeepSpeed. While DeepSpeed waits it holds memory that the page cache lacks for our files.
It recomputes each block; with ``--peer-keeps`` it keeps its activations, which takes less arithmetic and more memory.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness.benchmark import Benchmark, Facts, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.optimizer.report import report
from benchmarks.optimizer.workload import DEEPSPEED, FROM_META, NAMES, REFERENCE, Training

TRAIN = "benchmarks.optimizer.methods:train"
BYTES_AT_REST = 16  # of each parameter: itself, its gradient and two moments
CHOICES = tuple(method for method in NAMES if method not in (REFERENCE, FROM_META))


@dataclass(frozen=True)
class Settings:
    """Sizes, methods, and the number of pairs."""

    blocks: int = option(8, "transformer blocks")
    dim: int = option(1024, "channels", multiple=64)
    rows: int = option(16, "rows of the batch")
    positions: int = option(128, "tokens of a row")
    slots: int = option(3, "blocks in memory at once, in ours: one computes, one is updated, one waits between the two")
    graphs: int = option(512, "MiB of graphs that ours keeps instead of recomputing", least=0)
    pairs: int = option(5, "pairs of steps of each method")
    ways: tuple[str, ...] = option(CHOICES, "methods beside the resident one", choices=CHOICES)
    parameters: float | None = option(None, "a model of about so many parameters, on disk from the start", kind=float)
    peer_keeps: bool = option(False, "DeepSpeed keeps its activations instead of recomputing each block")


def training_of(settings: Settings) -> Training:
    """The model and its batch."""
    sizes = {name: getattr(settings, name) for name in ("dim", "rows", "positions", "slots", "graphs")}
    if settings.parameters is None:
        return Training(settings.blocks, **sizes)
    blocks = max(1, round(settings.parameters / Training(1, **sizes).parameters))
    # Every block moves the sum that the last one returns: in a deeper model each may move it less.
    rate = Training.learning_rate * min(1.0, Settings.blocks / blocks)
    return Training(blocks, **sizes, learning_rate=rate)


def plan(settings: Settings, folder: str) -> Plan:
    """One group: methods in pairs with the resident one, or, of a large model, ours and DeepSpeed in rounds."""
    training = training_of(settings)

    def case(method: str) -> Case:
        # Parameters are compared after the first step, a turn that does not count, and the pairs.
        saved = 0 if settings.parameters else 2 + settings.pairs
        how = {"method": method, "training": asdict(training), "folder": folder, "save_after": saved}
        if method != DEEPSPEED:
            return Case(NAMES[method], TRAIN, how)
        name = NAMES[method] + (", activations kept" if settings.peer_keeps else "")
        environment = {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"}
        return Case(name, TRAIN, {**how, "checkpointed": not settings.peer_keeps}, environment, DEEPSPEED)

    if settings.parameters is None:
        cases = [case(method) for method in (REFERENCE, *settings.ways)]
        yield Group("beside the resident model", cases, "pairs", settings.pairs, warmup=1)
    else:  # in the first turn a method makes the files of its moments
        cases = [case(method) for method in (FROM_META, *(way for way in settings.ways if way == DEEPSPEED))]
        yield Group("larger than memory", cases, "rounds", settings.pairs, warmup=1)


def prepare(settings: Settings, folder: Path) -> Facts:
    """Refuses a model that the disk cannot hold."""
    training, room = training_of(settings), shutil.disk_usage(folder).free
    needed = 1.2 * BYTES_AT_REST * training.parameters
    if room < needed:
        raise ValueError(
            f"expected {needed / 1e9:.0f} GB of free disk for {training.parameters / 1e6:,.0f} M parameters, "
            f"got {room / 1e9:.0f} GB in home={folder.parent}"
        )
    return []


BENCHMARK = Benchmark(Settings, plan, report, prepare)
