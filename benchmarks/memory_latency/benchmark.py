"""``memory-latency``: what each method saves in memory and costs in time.

Every method trains the same ``nn.Sequential`` on the same batch: the whole in memory, PyTorch's own ways to use less,
peers, and ``OffloadModel`` with each of its settings changed in turn. Each has its own process and takes its steps in
turn with plain PyTorch. In another process glibc's heap returns freed blocks at once: there the peak of a step is what
the method needs. What ``estimate()`` predicts after half of the turns is shown beside what was measured.
"""

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.memory_latency.report import IN_USE, report
from benchmarks.models.transformer import Stack

REFERENCE = "torch, all in memory"
WORKLOAD = "benchmarks.memory_latency.workload"
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}  # so that a peak is what is in use

Named = tuple[str, str, dict[str, Any], str]
#: Methods beside ours: name, function of ``methods.py``, settings, peer.
OTHERS: list[Named] = [
    ("torch, 4 micro-batches", "plain", {"microbatches": 4}, ""),
    ("torch.utils.checkpoint", "checkpointed", {}, ""),
    ("torch.utils.checkpoint, 4 micro-batches", "checkpointed", {"microbatches": 4}, ""),
    ("save_on_cpu", "saved_on_cpu", {}, ""),
    ("FSDP2, CPUOffloadPolicy", "fsdp2", {}, ""),
    ("DeepSpeed ZeRO-3, offload_param", "deepspeed_zero3", {}, "deepspeed"),
    ("fairscale OffloadModel", "fairscale_offload", {}, "fairscale-offload"),
]


@dataclass(frozen=True)
class Settings:
    """Sizes, the device, the number of pairs, and which cases."""

    device: str = option("cpu", "where layers compute")
    layers: int = option(12, "transformer blocks", least=4)
    dim: int = option(512, "channels, a multiple of 64", multiple=64)
    rows: int = option(16, "rows of the batch", least=4)
    positions: int = option(32, "tokens of a row")
    pairs: int = option(5, "steps in turn with plain PyTorch")
    only: tuple[str, ...] = option(("",), "only cases with one of these in their names")


def plan(settings: Settings, folder: str) -> Plan:
    """The groups: training in pairs with plain PyTorch; on a CPU the peaks in use; forward only."""
    stack = Stack(settings.layers, settings.dim, settings.rows, settings.positions)
    common = {"stack": asdict(stack), "home": folder, "device": settings.device}

    def cases(function: str, prefix: str, suffix: str, named: list[Named], **more: object) -> list[Case]:
        chosen = [entry for entry in named if any(word in prefix + entry[0] for word in settings.only)]
        environment = GIVE_BACK if suffix else {}
        return [
            Case(
                f"{prefix}{name}{suffix}",
                f"{WORKLOAD}:{function}",
                {"method": method, "settings": chosen_settings, **common, **more},
                environment,
                peer,
            )
            for name, method, chosen_settings, peer in ((REFERENCE, "plain", {}, ""), *chosen)
        ]

    training = OTHERS + _ours(settings.layers, 4 * stack.parameters // settings.layers)
    forward: list[Named] = [
        (f"ours: disk, {settings.layers} slices", "ours", {"num_slices": settings.layers}, ""),
        ("accelerate disk_offload", "accelerate_disk", {}, "accelerate"),
        ("diffusers group offloading, disk", "diffusers_groups", {}, "diffusers"),
    ]
    asked_after = 1 + settings.pairs // 2
    yield Group("training", cases("train", "", "", training, asked_after=asked_after), "pairs", settings.pairs, 1)
    if settings.device == "cpu":
        yield Group("in use", cases("in_use", "", IN_USE, training))
    passes = cases("forward", "forward, ", "", forward)
    yield Group("forward", passes if len(passes) > 1 else [], "pairs", settings.pairs, 1)


def _ours(most: int, layer_bytes: int) -> list[Named]:
    """Each setting of OffloadModel changed in turn: home, slices, keep or checkpoint, micro-batches, slots, budget."""
    half, few = most // 2, most // 4
    keep, checkpoint = {"checkpoint_activation": False}, {"checkpoint_activation": True}
    chosen: dict[str, dict[str, Any]] = {
        f"host, {few} slices, keep": {"disk": False, "num_slices": few, **keep},
        f"host, {few} slices, checkpoint": {"disk": False, "num_slices": few, **checkpoint},
        f"host, {most} slices, checkpoint": {"disk": False, "num_slices": most, **checkpoint},
        f"disk, {few} slices, keep": {"num_slices": few, **keep},
        f"disk, {most} slices, keep": {"num_slices": most, **keep},
        f"disk, {few} slices, checkpoint": {"num_slices": few, **checkpoint},
        f"disk, {half} slices, checkpoint": {"num_slices": half, **checkpoint},
        f"disk, {most} slices, checkpoint": {"num_slices": most, **checkpoint},
        f"disk, {most} slices, checkpoint, {half} slots": {"num_slices": most, "num_slots": half, **checkpoint},
    }
    for count in (2, 4):
        name = f"disk, {most} slices, checkpoint, {count} micro-batches"
        chosen[name] = {"num_slices": most, "num_microbatches": count, **checkpoint}
    for layers in (5, 8, 16):  # two slots and two sets of gradients of one layer are 4; the rest is for boundaries
        budget = layers * layer_bytes
        chosen[f"disk, budget {budget >> 20} MiB"] = {"num_slices": None, "memory_budget": budget, **checkpoint}
    return [(f"ours: {name}", "ours", settings, "") for name, settings in chosen.items()]


BENCHMARK = Benchmark(Settings, plan, report, rates=lambda settings: {"device": settings.device})
