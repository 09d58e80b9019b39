"""Training of a stack of blocks with clipping and AdamW, by ours and by others, in one process or in several ranks.

Each block is one unit of all of them: a shard, a checkpoint, or what is gathered by itself. DeepSpeed runs in an
environment of its own.
"""

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.case import FLOOR
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.ranks import Ranks, bytes_received
from benchmarks.harness.worker import Reporter
from benchmarks.models.deepspeed import deepspeed_nvme, start_deepspeed
from benchmarks.models.transformer import Checkpointed, Stack

STEPS = "steps"
RESIDENT, DISK, FROM_META, HOST, FSDP = "resident", "disk", "from meta", "host", "fsdp2"
DEEPSPEED, NVME = "deepspeed", "deepspeed-nvme"


@dataclass(frozen=True)
class Training(Stack):
    """A stack of blocks, the batch of all ranks, and how it is trained; ``graphs`` (MiB) and ``slots`` are ours."""

    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    max_norm: float = 1.0
    graphs: int = 0
    slots: int | None = None

    @property
    def options(self) -> dict[str, float]:
        """The arguments of AdamW."""
        return {"lr": self.learning_rate, "weight_decay": self.weight_decay}

    def gradient(self, model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
        """From state and target to the loss, in one forward and one backward of ``model``."""

        def run(value: Any, target: Tensor) -> Tensor:
            loss = loss_of(model(value), target)
            loss.backward()
            return loss.detach()

        return run


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Squared distance of each token, on average. Its gradient is far longer than 1: clipping always clips."""
    hidden = output[0] if isinstance(output, tuple) else output
    return (hidden - target).square().sum(dim=-1).mean()


class Method(NamedTuple):
    """A model that is ready to train, and the function that runs a step."""

    step: Callable[[Any, Tensor], float]  #: state and target to the loss; may leave an update to the next step
    parameters: Callable[[], Iterable[tuple[str, Tensor]]]  #: names and values, with every update applied
    model: object = None  #: an OffloadModel, which counts what it does


def _stepped(
    gradient: Callable[[Any, Tensor], Tensor], optimizer: torch.optim.Optimizer, clip: Callable[[], object]
) -> Callable[[Any, Tensor], float]:
    """A step as plain PyTorch code takes it: ``clip`` is called between backward and the optimizer's step."""

    def step(value: Any, target: Tensor) -> float:
        optimizer.zero_grad()
        loss = gradient(value, target)
        clip()
        optimizer.step()
        return loss.item()

    return step


def _in_memory(training: Training, blocks: nn.Module, model: nn.Module) -> Method:
    """Clipping and one fused AdamW by torch, of ``model``, which has the parameters of ``blocks``."""
    parameters = list(blocks.parameters())
    optimizer = torch.optim.AdamW(parameters, **training.options, fused=True)
    step = _stepped(
        training.gradient(model), optimizer, lambda: nn.utils.clip_grad_norm_(parameters, training.max_norm)
    )
    return Method(step, blocks.named_parameters)


def resident(training: Training, home: Path, ranks: Ranks | None, *, checkpointed: bool = True) -> Method:
    """Everything in memory in one process, each block checkpointed: the losses of all others."""
    blocks = training.build()
    return _in_memory(training, blocks, Checkpointed(blocks) if checkpointed else blocks)


def ours(
    training: Training,
    home: Path,
    ranks: Ranks | None,
    *,
    on_disk: bool = True,
    meta: bool = False,
    memory: int | str | None = None,
) -> Method:
    """``OffloadModel`` and ``OffloadOptimizer``, which clips. ``memory``: its only setting.

    ``meta``: of layers without memory whose values are loaded block by block; the model may be larger than memory.
    """
    from offload import MemoryPolicy, OffloadModel, OffloadOptimizer

    with torch.device("meta" if meta else "cpu"):
        layers = list(training.build())
    how: dict[str, Any] = {"checkpoint_activation": True}
    how |= {} if ranks is None else {"mesh": ranks.mesh}
    if training.slots is not None:
        how["memory"] = MemoryPolicy.fixed(slots=training.slots, graph_bytes=training.graphs << 20)
    how = how if memory is None else {"memory": memory}
    model = OffloadModel(layers, "cpu", home if on_disk else "cpu", **how)
    for k in range(training.blocks if meta else 0):
        values = {f"{k}.{name}": value for name, value in training.block(k).state_dict().items()}
        model.load_state_dict(values, strict=False)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=training.max_norm, **training.options)
    return Method(_stepped(training.gradient(model), optimizer, lambda: None), model.named_parameters, model)


def fsdp2(training: Training, home: Path, ranks: Ranks | None, *, checkpointed: bool = True) -> Method:
    """``fully_shard`` on each block with ``CPUOffloadPolicy``, and torch's own AdamW over its DTensors."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=False)
    blocks = training.build()
    if checkpointed:
        blocks = nn.Sequential(*map(_Checkpoint, blocks))
    for layer in (*blocks, blocks):
        fully_shard(layer, mesh=None if ranks is None else ranks.mesh, offload_policy=policy)
    return _in_memory(training, blocks, blocks)


class _Checkpoint(nn.Module):
    """A layer with ``torch.utils.checkpoint`` around it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor) -> Any:
        """What the layer returns."""
        return checkpoint(self.layer, value, use_reentrant=False)


def deepspeed(
    training: Training, home: Path, ranks: Ranks | None, *, on_disk: bool = True, checkpointed: bool = True
) -> Method:
    """ZeRO-3 with parameters and optimizer on NVMe, or in host memory, in fp32.

    Each block is checkpointed by torch, unless activations are kept.
    """
    theirs = start_deepspeed(on_disk=on_disk)
    settings = _deepspeed_settings(training, home, 1 if ranks is None else ranks.count, on_disk=on_disk)
    with theirs.zero.Init(config_dict_or_path=settings):
        blocks = training.build()
    # Parameters are partitioned by the time that a block scales them: they are set again.
    for k, block in enumerate(blocks):
        parameters = list(block.parameters())
        with torch.no_grad(), theirs.zero.GatheredParameters(parameters, modifier_rank=0):
            for parameter, value in zip(parameters, training.block(k).parameters(), strict=True):
                parameter.copy_(value)
    model = Checkpointed(blocks) if checkpointed else blocks
    engine, *_ = theirs.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(state: Any, target: Tensor) -> float:
        loss = loss_of(engine(state), target)
        engine.backward(loss)
        engine.step()  # clips
        return float(loss.item())

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in blocks.named_parameters():
            with theirs.zero.GatheredParameters(parameter):
                yield name, parameter.detach().clone()

    return Method(step, gathered)


def _deepspeed_settings(training: Training, home: Path, ranks: int, *, on_disk: bool) -> dict[str, Any]:
    block = training.parameters // training.blocks
    # Buffers of the widest matrix; and alive as much as our engine holds: about two blocks.
    settings = deepspeed_nvme(home, buffers=16, largest=4 * training.dim**2, block=block, live=2 * block)
    zero = settings["zero_optimization"]
    zero["stage3_prefetch_bucket_size"] = block
    if not on_disk:
        zero |= {f"offload_{kind}": {"device": "cpu", "pin_memory": False} for kind in ("param", "optimizer")}
    return {
        "train_micro_batch_size_per_gpu": max(1, training.rows // ranks),
        "gradient_clipping": training.max_norm,
        "optimizer": {"type": "AdamW", "params": training.options},
        **settings,
    }


METHODS: dict[str, tuple[Callable[..., Method], dict[str, Any]]] = {
    RESIDENT: (resident, {}),
    DISK: (ours, {}),
    FROM_META: (ours, {"meta": True}),
    HOST: (ours, {"on_disk": False}),
    FSDP: (fsdp2, {}),
    DEEPSPEED: (deepspeed, {"on_disk": False}),
    NVME: (deepspeed, {}),
}


def train(
    report: Reporter,
    method: str,
    training: dict[str, Any],
    together: bool = False,
    save_after: int = 0,
    how: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A case: builds the method, takes a first step that is not timed, and then one in each turn.

    Each method has a directory of its own. ``together``: this process is one of several ranks, each on rows of its own.
    Parameters are saved after ``save_after`` steps in all and compared with those of the resident model; 0: never.
    ``how``: more arguments of the method.
    """
    importlib.import_module("torch._dynamo")  # every torch optimizer imports it: a part of what torch alone takes
    report.phase(FLOOR)
    ranks = Ranks() if together else None
    home = Path(f"home-{method.replace(' ', '-')}").absolute()
    home.mkdir(parents=True, exist_ok=True)
    chosen, saved, (make, options) = Training(**training), home.with_suffix(".pt"), METHODS[method]
    made = make(chosen, home, ranks, **options, **(how or {}))

    def take(index: int) -> dict[str, float]:
        state, target = chosen.batch(index), chosen.target(index)
        if ranks is not None:
            state, target = (whole.tensor_split(ranks.count)[ranks.rank].clone() for whole in (state, target))
        before = bytes_received()
        loss, values = measure(lambda: made.step(state, target), made.model)
        values["received"] = bytes_received() - before
        return {
            "waited": values.get("wait_seconds", 0.0),
            "loss": loss if ranks is None else ranks.mean(loss),
            **values,
        }

    report.phase("first step")
    first = take(0)
    report.phase(STEPS)
    for k in report.turns():
        values = take(k + 1)
        if k + 2 == save_after:
            torch.save({name: value.detach().clone() for name, value in made.parameters()}, saved)
        started = time.perf_counter()
        os.sync()  # what the page cache holds is written to disk outside of other methods' turns
        report.step(**values, kernel=time.perf_counter() - started)
    counts = counts_of(made.model)
    report.phase("end")
    reference = home.with_name(f"home-{RESIDENT}.pt")
    compared = saved.exists() and reference.exists()
    difference = greatest_difference(reference, saved) if compared else None
    return {"first": first, "counts": counts, "difference": difference}


def greatest_difference(path: Path, other: Path) -> float:
    """The greatest relative difference of any tensor of two saved models: its length to that of the first tensor.

    Raises:
        ValueError: if they are not the same tensors by name.
    """
    first, second = (torch.load(name, mmap=True, weights_only=True) for name in (path, other))
    if set(first) != set(second):
        raise ValueError(f"expected the same parameters in both, got {sorted(set(first) ^ set(second))[:4]} in one")

    def apart(one: Tensor, two: Tensor) -> float:
        distance, length = (torch.linalg.vector_norm(value.double()) for value in (one - two, one))
        return float(distance / length) if length else float(distance)

    return max(apart(first[name], second[name]) for name in first)
