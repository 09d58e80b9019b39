"""How a model is trained, by ours, by torch and by others: a method is a name and a function that makes its step.

The function takes a :class:`Training` (the model, its batches, its loss and its optimizer), a folder for files, and the
ranks of the case. Each block is one unit of every method: a shard, a checkpoint, or what is gathered by itself. Peers
are imported inside; DeepSpeed runs in an environment of its own.
"""

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness.case import FLOOR, LOST, CannotRunError, told_by
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.memory import cap_memory
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.worker import Reporter
from benchmarks.models.deepspeed import deepspeed_nvme, start_deepspeed
from benchmarks.models.transformer import Stack, checkpointed

STEPS = "steps"
RESIDENT, DISK, FROM_META, HOST, FSDP = "resident", "disk", "from meta", "host", "fsdp2"
DEEPSPEED, NVME = "deepspeed", "deepspeed-nvme"


@dataclass(frozen=True)
class Training(Stack):
    """A stack of blocks, the batch of all ranks, and how it is trained; ``graphs`` (MiB) and ``slots`` are ours."""

    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    max_norm: float | None = 1.0  #: nothing is clipped without
    graphs: int = 0
    slots: int | None = None
    update: bool = True  #: else a step is forward and backward alone
    waits: bool = False  #: at its end a step waits for updates that ours would leave to the next one
    microbatches: int = 1  #: parts of a batch, one after the other

    device: ClassVar[str] = "cpu"  #: where layers compute
    mixed: ClassVar[bool] = False  #: bfloat16 over float32 masters
    path: ClassVar[str | None] = None  #: where in the model its blocks are; None: it is a sequence of them

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of AdamW; fused, it goes once over parameter, gradient and both moments."""
        return {"lr": self.learning_rate, "weight_decay": self.weight_decay, "fused": True}

    def recomputed(self, model: nn.Module) -> nn.Module:
        """What runs the model with its blocks checkpointed."""
        return checkpointed(model)

    def offloaded(self, where: Path | str, *, meta: bool, **how: Any) -> Any:
        """The model as an OffloadModel; ``meta``: of layers that have no values yet."""
        from offload import OffloadModel

        with torch.device("meta" if meta else "cpu"):
            layers = self.build()
        return OffloadModel(layers, self.device, where, blocks=self.path, **how)

    def example(self, step: int) -> tuple[Any, ...]:
        """What a step trains on: the state before the first block, and what the last one should return."""
        return self.batch(step), self.target(step)

    def loss(self, model: nn.Module, value: Any, target: Tensor) -> Tensor:
        """Squared distance of each token, on average. Its gradient is far longer than 1: clipping always clips."""
        output = model(value)
        hidden = output[0] if isinstance(output, tuple) else output
        return (hidden - target).square().sum(dim=-1).mean()

    def gradient(self, model: nn.Module) -> Callable[..., Tensor]:
        """From an example to the loss, in a forward and a backward of ``model`` for each micro-batch."""

        def run(*example: Any) -> Tensor:
            parts = self.microbatches
            pieces = [example] if parts == 1 else zip(*(whole.chunk(parts) for whole in example), strict=True)
            losses = []
            for piece in pieces:
                with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.mixed):
                    loss = self.loss(model, *piece) / parts
                loss.backward()
                losses.append(loss.detach())
            return torch.stack(losses).sum()

        return run


class Method(NamedTuple):
    """A model that is ready to train, and the function that runs a step."""

    step: Callable[..., Tensor | float]  #: an example to the loss; may leave an update to the next step
    parameters: Callable[[], Iterable[tuple[str, Tensor]]] = dict  #: names and values, with every update applied
    model: Any = None  #: an OffloadModel, which counts what it does
    run: Any = None  #: the module that computes


def take_turns(
    report: Reporter,
    method: Method,
    example: Callable[[int], tuple[Any, ...]],
    device: str = "cpu",
    after: Callable[[int], Mapping[str, Any]] = lambda k: {},
    shown: Callable[[float], float] = float,
) -> None:
    """A step in each turn; reports its loss as it is ``shown``, what it takes, and what ``after`` it is told."""
    for k in report.turns():
        given = example(k)
        loss, values = measure(lambda given=given: method.step(*given), method.model, device)
        del given  # never two at once
        report.step(**{"loss": shown(float(loss)), **values, **after(k)})


def written_out() -> float:
    """Seconds in which the kernel writes what its page cache holds to disk, outside of other methods' turns."""
    started = time.perf_counter()
    os.sync()
    return time.perf_counter() - started


def stepped(training: Training, model: nn.Module, run: Any, optimizer: Any, *, clipped: bool = False) -> Method:
    """A step as plain PyTorch code takes it: ``run`` computes with the parameters of ``model``."""
    gradient = training.gradient(run)

    def step(*example: Any) -> Tensor:
        (optimizer if training.update else model).zero_grad()
        loss = gradient(*example)
        if training.update:
            if clipped and training.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
            optimizer.step()
            if training.waits and hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
        return loss

    return Method(step, model.named_parameters, model if hasattr(model, "memory_report") else None, run)


def in_memory(training: Training, model: nn.Module, run: Any) -> Method:
    """Clipping and one fused AdamW by torch."""
    optimizer = torch.optim.AdamW(model.parameters(), **training.options)
    return stepped(training, model, run, optimizer, clipped=True)


def resident(training: Training, home: Path, ranks: Ranks | None, *, checkpointed: bool = True) -> Method:
    """Everything on the device in one process, each block checkpointed: the losses of all others."""
    model = training.build()
    return in_memory(training, model, training.recomputed(model) if checkpointed else model)


def save_on_cpu(training: Training, home: Path, ranks: Ranks | None) -> Method:
    """``torch.autograd.graph.save_on_cpu``: activations in host memory, all else on the device."""
    model: Any = training.build()

    def run(*values: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=training.device != "cpu"):
            return model(*values)

    return in_memory(training, model, run)


def torchao(training: Training, home: Path, ranks: Ranks | None) -> Method:
    """States and gradients in host memory; it has no clipping, since gradients leave during backward."""
    if training.device == "cpu":
        raise CannotRunError("torchao's optimizer needs a GPU: it copies in CUDA streams")
    theirs, model = importlib.import_module("torchao.optim").CPUOffloadOptimizer, training.build()
    optimizer = theirs(model.parameters(), torch.optim.AdamW, offload_gradients=True, **training.options)
    return stepped(training, model, training.recomputed(model), optimizer)


def fairscale(training: Training, home: Path, ranks: Ranks | None) -> Method:
    """fairscale's OffloadModel, whose streams need a GPU: its parameters are in host memory, and updated there."""
    if training.device == "cpu":
        raise CannotRunError("fairscale's OffloadModel needs a GPU: it copies in CUDA streams")
    theirs: Any = importlib.import_module("fairscale.experimental.nn.offload").OffloadModel
    model, places = training.build().to("cpu"), (torch.device(training.device), torch.device("cpu"))
    names = [name for name, _ in model.named_parameters()]
    run = theirs(model, *places, num_slices=training.blocks, checkpoint_activation=True)
    made = in_memory(training, run, run)
    return made._replace(parameters=lambda: zip(names, run.parameters(), strict=True))


def ours(
    training: Training,
    home: Path,
    ranks: Ranks | None,
    *,
    on_disk: bool = True,
    meta: bool = False,
    memory: int | str | None = None,
    policy: Any = None,
    updates: dict[str, Any] | None = None,
    **settings: Any,
) -> Method:
    """``OffloadModel`` and ``OffloadOptimizer``, which clips; with ``memory`` blocks are recomputed as it plans.

    ``meta``: of layers without memory whose values are loaded block by block; the model may be larger than memory.
    ``policy``: a MemoryPolicy by hand; ``updates``: arguments of the optimizer; ``settings``: more of the model.
    """
    from offload import MemoryPolicy, OffloadOptimizer

    how: dict[str, Any] = {"checkpoint_activation": True} if memory is None else {"memory": memory}
    if policy is not None:
        how["memory"] = policy
    if ranks is not None:
        how["mesh"] = ranks.mesh
    if training.slots is not None and memory is None:
        how["memory"] = MemoryPolicy.fixed(slots=training.slots, graph_bytes=training.graphs << 20)
    model = training.offloaded(home if on_disk else "cpu", meta=meta, **{**how, **settings})
    for k in range(training.blocks if meta and "pretrained" not in settings else 0):
        values = {f"{k}.{name}": value for name, value in training.block(k).state_dict().items()}
        model.load_state_dict(values, strict=False)
    optimizer = None
    if training.update:
        options = {"max_norm": training.max_norm, **training.options, **(updates or {})}
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, **options)
    return stepped(training, model, model, optimizer)


def fsdp2(training: Training, home: Path, ranks: Ranks | None, *, checkpointed: bool = True) -> Method:
    """``fully_shard`` on each block with ``CPUOffloadPolicy``, and torch's own AdamW over its DTensors."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    ranks = ranks or Ranks(training.device)
    how: dict[str, Any] = {"mesh": ranks.mesh, "offload_policy": CPUOffloadPolicy(pin_memory=training.device != "cpu")}
    if training.mixed:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        training = replace(training, mixed=False)
    model: Any = training.build().to("cpu")
    run = training.recomputed(model) if checkpointed else model
    blocks = run if training.path is None else run.get_submodule(training.path)
    for block in (*blocks, run):
        fully_shard(block, **how)
    return in_memory(training, run, run)


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
    model = training.recomputed(blocks) if checkpointed else blocks
    engine, *_ = theirs.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(*example: Any) -> Tensor:
        loss = training.loss(engine, *example)
        engine.backward(loss)
        engine.step()  # clips
        return loss.detach()

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
    adamw = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    return {
        "train_micro_batch_size_per_gpu": max(1, training.rows // ranks),
        "gradient_clipping": training.max_norm,
        "optimizer": {"type": "AdamW", "params": adamw},
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
    "save_on_cpu": (save_on_cpu, {}),
    "torchao": (torchao, {}),
    "fairscale": (fairscale, {}),
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

    def example(index: int) -> tuple[Any, ...]:
        whole = chosen.example(index)
        return whole if ranks is None else tuple(each.tensor_split(ranks.count)[ranks.rank].clone() for each in whole)

    def after(k: int) -> dict[str, float]:
        if k + 2 == save_after:
            save(made.parameters(), saved)
        return {"kernel": written_out()}

    report.phase("first step")
    first = {"loss": float(made.step(*example(0)))}
    report.phase(STEPS)
    mean = float if ranks is None else ranks.mean
    take_turns(report, made, lambda k: example(k + 1), after=after, shown=mean)
    report.phase("end")
    return {"first": first, "counts": counts_of(made.model), "difference": difference(f"home-{RESIDENT}.pt", saved)}


def train_capped(
    report: Reporter, make: Callable[[Path], Method], example: Callable[[int], tuple[Any, ...]], cap: int | None
) -> dict[str, Any]:
    """Builds a method, and takes a step in each turn; a want of memory under a ``cap`` (MiB) is a result, too."""
    importlib.import_module("torch._dynamo")  # torch imports it in a first step, which would count
    report.phase(FLOOR)
    where = "while it was built"
    try:
        if cap is not None:
            cap_memory(cap << 20)
        report.phase("build")
        started = time.perf_counter()
        made = make(Path("home").absolute())
        seconds = time.perf_counter() - started
        report.phase(STEPS)
        where = "in a step"
        take_turns(report, made, example)
    except LOST as error:
        return {"out_of_memory": f"{where}: {told_by(error)}"}
    return {"build_seconds": seconds, "statistics": counts_of(made.model) or None}


def save(tensors: Iterable[tuple[str, Tensor]], path: str | Path) -> None:
    """Writes named tensors."""
    torch.save({name: value.detach().cpu().clone() for name, value in tensors}, path)


def difference(path: str | Path, other: str | Path) -> float | None:
    """The greatest relative difference of any tensor of two saved models: its length to that of the first tensor.

    None if one was not saved.

    Raises:
        ValueError: if they are not the same tensors by name.
    """
    if not (Path(path).exists() and Path(other).exists()):
        return None
    first, second = (torch.load(name, mmap=True, weights_only=True) for name in (path, other))
    if set(first) != set(second):
        raise ValueError(f"expected the same parameters in both, got {sorted(set(first) ^ set(second))[:4]} in one")

    def apart(one: Tensor, two: Tensor) -> float:
        distance, length = (torch.linalg.vector_norm(value.double()) for value in (one - two, one))
        return float(distance / length) if length else float(distance)

    return max(apart(first[name], second[name]) for name in first)
