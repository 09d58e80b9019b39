"""The methods of ``gpu``: each trains a :class:`Work` in bfloat16 over float32 masters, with clipping and AdamW."""

import importlib
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.work import Work, next_token_loss
from benchmarks.harness.case import CannotRunError
from benchmarks.memory_latency.methods import fairscale_offload
from benchmarks.models.contrastive import TEMPERATURE, sentence_transformers_gradient
from benchmarks.models.transformer import Checkpointed

ADAMW: dict[str, Any] = {"lr": 1e-4}
FUSED: dict[str, Any] = {**ADAMW, "fused": True}  # one pass over parameter, gradient and both moments
NORM = 1.0  #: gradients are clipped to it

Step = Callable[[], Tensor]
"""Forward, backward and update; the loss."""


class Made(NamedTuple):
    """A method that is ready to train; ``model`` is the OffloadModel, where there is one."""

    step: Step
    model: Any = None


def _updated(work: Work, device: str, run: Any, update: Callable[[], object], autocast: bool = True) -> Step:
    batch = work.batch(device)

    def step() -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            loss = work.loss(run(batch))
        loss.backward()
        update()
        return loss.detach()

    return step


def _clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def plain(work: Work, device: str) -> Made:
    """All on the device."""
    model = work.build(device)
    return Made(_updated(work, device, model, _clipped(model, torch.optim.AdamW(model.parameters(), **FUSED))))


def _with_checkpoints(work: Work, device: str) -> tuple[nn.Module, nn.Module]:
    """The model, and a module that runs it and recomputes its blocks."""
    model: Any = work.build(device)
    if work.path is None:
        return model, Checkpointed(model)
    with warnings.catch_warnings():  # its later name is not in all versions
        warnings.simplefilter("ignore", FutureWarning)
        model.body.gradient_checkpointing_enable({"use_reentrant": False})
    return model, model


def checkpointed(work: Work, device: str) -> Made:
    """All on the device; blocks are recomputed."""
    model, run = _with_checkpoints(work, device)
    return Made(_updated(work, device, run, _clipped(model, torch.optim.AdamW(model.parameters(), **FUSED))))


def torchao(work: Work, device: str) -> Made:
    """States and gradients in host memory; it has no clipping, since gradients leave during backward."""
    if device == "cpu":
        raise CannotRunError("torchao's optimizer needs a GPU: it copies in CUDA streams")
    optimizers = importlib.import_module("torchao.optim")
    model, run = _with_checkpoints(work, device)
    optimizer = optimizers.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, **FUSED)
    return Made(_updated(work, device, run, lambda: (optimizer.step(), optimizer.zero_grad())))


def save_on_cpu(work: Work, device: str) -> Made:
    """All on the device, but activations."""
    model = work.build(device)

    def run(batch: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=device != "cpu"):
            output: Tensor = model(batch)
        return output

    return Made(_updated(work, device, run, _clipped(model, torch.optim.AdamW(model.parameters(), **FUSED))))


def fairscale(work: Work, device: str) -> Made:
    """fairscale's OffloadModel: its parameters are in host memory, and updated there."""
    run: Any = fairscale_offload(work.build("cpu"), Path(), device, slices=work.blocks).run  # type: ignore[arg-type]
    return Made(_updated(work, device, run, _clipped(run, torch.optim.AdamW(run.parameters(), **FUSED))))


def fsdp2(work: Work, device: str) -> Made:
    """``fully_shard`` of one rank with ``CPUOffloadPolicy``: parameters, gradients and states are in host memory."""
    from torch import distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    file = Path(tempfile.mkdtemp(dir="."), "store").absolute()
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, store=distributed.FileStore(str(file), 1), rank=0, world_size=1)
    _, run = _with_checkpoints(work, "cpu")
    model: Any = run.layers if isinstance(run, Checkpointed) else run
    how = {
        "mesh": distributed.init_device_mesh(torch.device(device).type, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device != "cpu"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True),
    }
    for block in (*(model if work.path is None else model.body.layers), model):
        fully_shard(block, **how)
    optimizer = torch.optim.AdamW(model.parameters(), **FUSED)
    return Made(_updated(work, device, run, _clipped(model, optimizer), autocast=False))


class _First(nn.Module):
    """Tokens to embedded tokens, and the tokens."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.embedding = body.get_input_embeddings()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(ids), ids


class _Inner(nn.Module):
    """A block of the body; the tokens pass through."""

    def __init__(self, body: Any, block: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, body.rotary_emb

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, ids = state
        turned = self.rotary(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
        return self.block(hidden, position_embeddings=turned), ids


class _Last(nn.Module):
    """The loss."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.norm, self.embedding = body.norm, body.get_input_embeddings()

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        hidden, ids = state
        return next_token_loss(self.norm(hidden), self.embedding.weight, ids)


def roundpipe(work: Work, device: str, stale: bool = False) -> Made:
    """RoundPipe over a sequence of blocks in bfloat16, two micro-batches; ``stale``: updates are a step late."""
    if device == "cpu":
        raise CannotRunError("RoundPipe needs a GPU")
    theirs = importlib.import_module("roundpipe")
    model: Any = work.build(device).to(torch.bfloat16).cpu()
    if work.path is not None:
        body = model.body
        model = nn.Sequential(_First(body), *(_Inner(body, block) for block in body.layers), _Last(body))
    parts = 2
    config = theirs.RoundPipeRunConfig(num_microbatch=parts)
    model = theirs.RoundPipe(model, optim_dtype=torch.float32, model_run_config=config, pin_model="register")
    optimizer = theirs.optim.Adam(model.optim_parameters(), **ADAMW, weight_decay=0.01, decoupled_weight_decay=True)
    batch = work.batch(device).cpu()
    batch = batch.to(torch.bfloat16) if batch.is_floating_point() else batch

    def update() -> None:
        nn.utils.clip_grad_norm_(model.optim_parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()

    def step() -> Tensor:
        loss = model.forward_backward((batch,), loss_fn=lambda output, _: work.loss(output) / parts)
        model.step(update, is_async=stale)
        return loss

    return Made(step)


def ours(work: Work, device: str, memory: str | int | None = None, **more: Any) -> Made:
    """``OffloadModel`` in host memory and ``OffloadOptimizer``; without ``memory`` it streams all, with two slots."""
    from offload import OffloadModel, OffloadOptimizer

    least = {"checkpoint_activation": True, "num_slices": work.blocks or None}
    options: dict[str, Any] = least if memory is None else {"memory": memory}
    model: Any = OffloadModel(work.build(device), device, "cpu", blocks=work.path, **options, **more)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=NORM, **FUSED)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Made(_updated(work, device, model, update), model)


METHODS: dict[str, Callable[..., Made]] = {
    method.__name__: method for method in (plain, checkpointed, torchao, save_on_cpu, fairscale, fsdp2, roundpipe, ours)
}

# --- a contrastive batch ---------------------------------------------------------------------------------------------


def _represented(encoder: Any, ids: Tensor) -> Tensor:
    return functional.normalize(encoder(input_ids=ids).last_hidden_state[:, -1], dim=-1)


def _pairs(work: Work, device: str) -> tuple[Tensor, Tensor]:
    """Queries and passages (rows, positions); a pair shares the latter half of its tokens."""
    passages = work.batch(device)
    queries = passages.clone()
    queries[:, : work.positions // 2] = passages.flip(0)[:, : work.positions // 2]
    return queries, passages


def _contrast(step: Callable[[Tensor, Tensor], Tensor], work: Work, device: str) -> Step:
    queries, passages = _pairs(work, device)

    def run() -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return step(queries, passages)

    return run


def contrast_sentence_transformers(work: Work, device: str, chunk: int) -> Made:
    """The cached ranking loss of sentence-transformers, all on the device."""
    encoder: Any = work.build(device).body
    backward = sentence_transformers_gradient(encoder, lambda ids: _represented(encoder, ids), chunk, device)
    update = _clipped(encoder, torch.optim.AdamW(encoder.parameters(), **FUSED))

    def step(queries: Tensor, passages: Tensor) -> Tensor:
        loss = backward(queries, passages)
        update()
        return loss

    return Made(_contrast(step, work, device))


def contrast_ours(work: Work, device: str, chunk: int, memory: str | int) -> Made:
    """GradCache over an OffloadModel in host memory."""
    from gradcache import GradCache
    from gradcache.loss import SimpleContrastiveLoss
    from offload import OffloadModel, OffloadOptimizer

    encoder: Any = OffloadModel(work.build(device).body, device, "cpu", blocks="layers", memory=memory)
    optimizer = OffloadOptimizer(encoder, torch.optim.AdamW, max_norm=NORM, **FUSED)
    represent = lambda output: functional.normalize(output.last_hidden_state[:, -1], dim=-1)  # noqa: E731
    loss_fn = SimpleContrastiveLoss(temperature=TEMPERATURE)
    cache = GradCache([encoder, encoder], chunk, loss_fn, get_rep_fn=represent)

    def step(queries: Tensor, passages: Tensor) -> Tensor:
        loss = cache({"input_ids": queries}, {"input_ids": passages})
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Made(_contrast(step, work, device), encoder)


METHODS |= {method.__name__: method for method in (contrast_sentence_transformers, contrast_ours)}
