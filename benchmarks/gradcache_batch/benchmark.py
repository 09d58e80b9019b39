"""``gradcache-batch``: the largest exact contrastive batch in fixed memory, and what a step and its chunks cost.

Four parts. *Time*: one model, one batch, the same chunks; each method takes its steps in turn with the package
GradCache over ``torch.utils.checkpoint``. *Memory*: batches double until a cap on the process's memory refuses one.
*Chunks*: one batch in more and more chunks, over a model on disk, where the bytes that move are what a step costs.
*Loss*: the loss of a very large batch by itself.

Times are measured under the default allocator. glibc keeps much of what was freed, so peaks are those of further
processes with a fixed ``MALLOC_MMAP_THRESHOLD_``, which returns freed tensors at once and takes time.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from benchmarks.gradcache_batch.report import CHUNK_BY_CHUNK, FUSED, MAXIMUM_RATIO, REFERENCE, report
from benchmarks.gradcache_batch.workload import Shape
from benchmarks.harness.benchmark import Benchmark, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option

LOSS_WIDTH = 256
METHODS = "benchmarks.gradcache_batch.methods"
PEERS = {REFERENCE: "gradcache", f"{REFERENCE}, nothing checkpointed": "gradcache"} | {
    "sentence-transformers": "sentence-transformers"
}
TIMED = (REFERENCE, f"{REFERENCE}, nothing checkpointed", *MAXIMUM_RATIO)
GROWING = ("plain torch", "torch.utils.checkpoint", *PEERS, "ours", FUSED)
CHUNKED = (REFERENCE, "ours", CHUNK_BY_CHUNK, FUSED)
# Below the size of a tensor of one chunk, so that freed tensors count neither in peaks nor against the cap.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}


@dataclass(frozen=True)
class Settings:
    """Sizes of the parts, and how often to measure."""

    dim: int = option(768, "channels, of the part time", least=64, multiple=64)
    depth: int = option(12, "blocks")
    vocabulary: int = option(36_000, "rows of the embedding")
    positions: int = option(128, "tokens of a row")
    pairs: int = option(8, "pairs of the batch")
    chunk: int = option(2, "rows of a chunk")
    kept: int = option(440, "MiB kept between the passes, layers in memory")
    graphs: int = option(690, "MiB of graphs kept over an OffloadModel", least=0)
    rounds: int = option(3, "pairs of steps for each method")
    limit: int = option(96, "MiB that a method may take, of the part memory")
    most: int = option(4096, "pairs at which batches stop growing")
    loss_rows: int = option(65_536, "rows for the loss by itself")
    small_dim: int = option(128, "channels of the part memory", least=64, multiple=64)
    chunks: tuple[int, ...] = option((1, 4, 16, 64, 256), "numbers of chunks, of the part chunks")
    chunked_dim: int = option(512, "channels of the part chunks", least=64, multiple=64)


def shape_of(settings: Settings) -> Shape:
    """The model and the batch of the part time."""
    names = ("vocabulary", "positions", "dim", "depth", "pairs", "chunk", "kept", "graphs")
    return Shape(**{name: getattr(settings, name) for name in names}, together=1024)


def plan(settings: Settings, folder: str) -> Plan:
    """The groups: time, peaks, growing batches, chunks, the loss."""

    def case(method: str, function: str, shape: Shape, environment: Mapping[str, str], **more: object) -> Case:
        arguments = {"method": method, "shape": asdict(shape), "home": folder, **more}
        return Case(method, f"{METHODS}:{function}", arguments, environment, PEERS.get(method, ""))

    timed = shape_of(settings)
    small = Shape(4096, 16, settings.small_dim, 4, pairs=16, chunk=16, kept=settings.limit // 4, graphs=0, together=8)
    pairs = max(settings.chunks) // 2 or 1
    cut = Shape(4096, 8, settings.chunked_dim, 4, pairs=pairs, chunk=1, kept=64, graphs=64, together=64)
    grown = {"limit_mebibytes": settings.limit, "most_pairs": settings.most}
    laddered = {"chunks": list(settings.chunks), "steps": 2}
    loss = {"rows": settings.loss_rows, "width": LOSS_WIDTH}
    yield Group("time", [case(method, "in_turn", timed, {}) for method in TIMED], "pairs", settings.rounds, warmup=1)
    yield Group("peaks", [case(method, "in_turn", timed, GIVE_BACK) for method in TIMED], turns=2)
    yield Group("growing", [case(method, "growing", small, GIVE_BACK, **grown) for method in GROWING])
    yield Group("chunks", [case(method, "ladder", cut, {}, **laddered) for method in CHUNKED])
    yield Group("loss", [Case("loss", f"{METHODS}:loss_alone", loss, GIVE_BACK)])


BENCHMARK = Benchmark(Settings, plan, report, rates=lambda settings: {"tries": 2})
