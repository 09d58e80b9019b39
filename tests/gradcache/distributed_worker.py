"""What is claimed of two processes: each function of :data:`CLAIMS` raises in the one where it does not hold.

The functions run in processes of their own, since a process group is global: ``test_distributed``.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradcache import GradCache
from gradcache.functional import cached, cat_input_tensor, gather_input_tensor
from gradcache.loss import DistributedContrastiveLoss, SimpleContrastiveLoss
from gradcache.sentence_transformers import CachedGISTEmbedLoss, CachedMultipleNegativesRankingLoss
from offload import OffloadModel
from tests.gradcache.towers import WAYS, Sentences, tower
from tests.gradients import assert_same_step


def batch(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def square(x: Tensor) -> Tensor:
    return x.square().sum()


def parts_of(rows: list[int], rank: int, *tensors: Tensor) -> list[Tensor]:
    """This process's rows of whole batches; targets may have several rows per query."""
    start = sum(rows[:rank])
    return [t[start * (len(t) // sum(rows)) : (start + rows[rank]) * (len(t) // sum(rows))] for t in tensors]


def compare(rank: int, rows: list[int], chunk: int, negatives: int, **how: Any) -> None:
    """Two towers (or one tied) over uneven processes against the whole batch in one process.

    Each gradient and each representation is reduced once: not once per tower or chunk, but one parameter each, one flag
    each, the targets' gradient, and the loss's value.
    """
    tied, static, tiles, temperature = (how.get(k) for k in ("tied", "static", "tiles", "temperature"))
    expected: list[nn.Module] = [tower(1), tower(1 if tied else 2)]
    ours: list[nn.Module] = [tower(1), tower(1 if tied else 2)]
    if tied:
        expected[1], ours[1] = expected[0], ours[0]
    x, y = batch(sum(rows), 3), batch(sum(rows) * (1 + negatives), 4)
    references: Any = SimpleContrastiveLoss(negatives)
    loss_fn: Any = DistributedContrastiveLoss(negatives, tile_rows=tiles)
    if temperature:
        references, loss_fn = Scaled(references), Scaled(loss_fn)
    loss = references(expected[0](x), expected[1](y))
    loss.backward()
    wrappers = {id(m): DistributedDataParallel(m, static_graph=bool(static)) for m in ours}
    towers = [wrappers[id(m)] for m in ours]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces:
        mine = GradCache(towers, chunk, loss_fn)(*parts_of(rows, rank, x, y), no_sync_except_last=True)
    reduced = [call.args[0].numel() for call in reduces.call_args_list]
    trained = [loss_fn, *ours] if temperature else ours
    assert abs(float(mine) - float(loss.detach())) < 1e-6
    assert_same_step([references, *expected] if temperature else expected, trained)
    parameters = list(nn.ModuleList(trained).parameters())
    assert sorted(reduced) == sorted([sum(p.numel() for p in parameters), len(parameters), len(y) * 6, 1])


class Scaled(nn.Module):
    """A loss with a learnable temperature."""

    def __init__(self, inner: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x * self.scale, y)


def unused_parameters_and_gradients_of_before(rank: int) -> None:
    """A tower that one process's loss ignores counts 0 there; what was in ``.grad`` is not averaged again."""
    models = [tower(1), tower(2), tower(3)]
    wrapped = [DistributedDataParallel(m) for m in models]
    models[0][0].weight.grad = torch.full_like(models[0][0].weight, 5.0 + rank)
    inputs = [batch(4, 10 * rank + k) for k in range(3)]

    def loss(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a.square().sum() + (b.square().sum() if rank == 0 else 0.0)

    GradCache(wrapped, 3, loss)(*inputs)
    expected = [tower(1), tower(2), tower(3)]
    first = sum(expected[0](batch(4, 10 * r)).square().sum() for r in range(2))
    ((first + expected[1](batch(4, 1)).square().sum()) / 2).backward()
    expected[0][0].weight.grad += 5.0 + rank
    assert_same_step(expected, models)


def targets_of_queries_that_one_process_has(rank: int) -> None:
    x, y, target = batch(6, 1), batch(12, 2)[:, :6], torch.arange(6)
    plain, mine = tower(1), tower(1)
    expected = SimpleContrastiveLoss()(plain(x), y, target)
    expected.backward()
    found = DistributedContrastiveLoss()(mine(x[: 0 if rank else 6]), y[6 * rank :][:6], target)
    found.backward()
    for p in mine.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
    assert abs(float(found) - float(expected)) < 1e-6
    assert_same_step([plain], [mine])


def static_graph_beside_steps(rank: int) -> None:
    """The wrapper counts gradients in its first backward, which must be its own if it is used for others."""
    x = batch(8, 3)
    for own_first in (True, False):
        expected, ours = tower(1), tower(1)
        wrapped = DistributedDataParallel(ours, static_graph=True)
        mine = x[4 * rank : 4 * rank + 4]
        step = GradCache([wrapped], 2, torch.mean)
        if own_first:
            for model, given in ((expected, x), (wrapped, mine)):
                model(given).square().mean().backward()
        for _ in range(2):
            step(mine)
            if not own_first:
                with pytest.raises(RuntimeError, match="run one before them, or leave out static_graph"):
                    wrapped(mine)
                return
            wrapped(mine).square().mean().backward()
            (expected(x).mean() + expected(x).square().mean()).backward()
        assert_same_step([expected], [ours])


def buffers_follow_rank_0(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
    wrapped = DistributedDataParallel(model)
    with torch.no_grad():  # after wrapping, which broadcasts too
        model[1].running_mean.fill_(float(rank))
    GradCache([wrapped], 4, lambda r: r.exp().sum())(torch.zeros(4, 8))
    torch.testing.assert_close(model[1].running_mean, model[0].bias * 0.1)


def functional(rank: int) -> None:
    """The loop of the peer's documentation: cached calls, lists concatenated, gathered, scaled by the world size."""
    expected = tower(1)
    x, y = batch(8, 3), batch(8, 4)
    SimpleContrastiveLoss()(expected(x), expected(y)).backward()
    model = tower(1)
    wrapped = DistributedDataParallel(model)

    @cached
    def encode(module: nn.Module, *, chunk: Tensor) -> Tensor:
        return module(chunk)

    @cat_input_tensor
    @gather_input_tensor
    def loss(x: Tensor, *, y: Tensor) -> Tensor:
        return SimpleContrastiveLoss()(x, y) * dist.get_world_size()

    mine = parts_of([3, 5], rank, x, y)
    calls = [[encode(wrapped, chunk=chunk) for chunk in part.split(2)] for part in mine]
    loss([leaf for leaf, _ in calls[0]], y=[leaf for leaf, _ in calls[1]]).backward()
    with wrapped.no_sync():
        for leaf, again in calls[0] + calls[1]:
            again(leaf)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    @gather_input_tensor(axis=1)
    def width(x: Tensor) -> int:
        return x.size(1)

    assert_same_step([expected], [model])
    assert width(torch.zeros(2, 3 + rank)) == 3 + 4


def offloaded_tower_in_a_wrapper(rank: int) -> None:
    model = OffloadModel(tower(1), "cpu", num_slices=2, checkpoint_activation=True)
    step = GradCache([DistributedDataParallel(model)], 2, square)
    with pytest.raises(ValueError, match="average them after the step"):
        step(batch(4, rank))


def narrow(rank: int) -> None:
    """bfloat16 parameters are summed over chunks and processes in 32 bits."""
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False).bfloat16()
    x = [torch.rand(1024, 16, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(2)]
    GradCache([DistributedDataParallel(model)], 1, lambda r: r.float().sum())(x[rank])
    exact = torch.stack([part.double().sum(0) for part in x]).mean(0).expand(8, 16)
    assert float((model.weight.grad.double() - exact).norm() / exact.norm()) < 0.01


SPELLINGS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "module": lambda module: module,
    "bound method": lambda module: module.forward,
    "lambda": lambda module: lambda *given: module(*given),
    "partial": lambda module: partial(module.forward),
    "object": lambda module: Holding(module).call,
}


class Holding:
    """A plain object that holds a module."""

    def __init__(self, module: nn.Module) -> None:
        self.parts = {"inner": module}

    def call(self, *given: Tensor) -> Tensor:
        return self.parts["inner"](*given)


class Shifted(nn.Module):
    """What process_fn and get_rep_fn train."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(0, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.shift.exp()


def head(rank: int, spelling: str, kind: str) -> None:
    """What is trained besides a wrapped tower, in a function spelt in one of several ways."""
    losses = SimpleContrastiveLoss(), DistributedContrastiveLoss()
    kinds = [{"loss_fn": Scaled(loss), "get_rep_fn": Shifted(6), "process_fn": Shifted(8)} for loss in losses]
    theirs, ours = (each[kind] for each in kinds)
    expected, model, x, y = tower(1), tower(1), batch(8, 3), batch(8, 4)
    GradCache([expected] * 2, 8, **{"loss_fn": losses[0], kind: theirs})(x, y)
    functions: dict[str, Any] = {"loss_fn": losses[1], kind: SPELLINGS[spelling](ours)}
    GradCache([DistributedDataParallel(model)] * 2, 2, **functions)(*parts_of([5, 3], rank, x, y))
    assert_same_step([expected, theirs], [model, ours])


HIDDEN = Scaled(SimpleContrastiveLoss())


def hidden_parameter_is_refused(rank: int) -> None:
    """A function that looks its module up by a name that it puts together."""
    model = tower(1)
    for kind in ("loss_fn", "get_rep_fn"):

        def hidden(*given: Tensor, how: str = kind) -> Tensor:
            module = globals()["HID" + "DEN"]
            return module(*given) if how == "loss_fn" else given[0] * module.scale

        functions: dict[str, Any] = {"loss_fn": DistributedContrastiveLoss(), kind: hidden}
        cache = GradCache([DistributedDataParallel(model)] * 2, 2, **functions)
        with pytest.raises(ValueError, match="make the function an nn"):
            cache(batch(4, 1), batch(4, 2))
    assert all(p.grad is None for p in [*model.parameters(), *HIDDEN.parameters()])


def other_forward_of_the_wrapper(rank: int, how: str) -> None:
    """An auxiliary loss on the wrapper itself, in the same backward as chunks, or around a step."""
    expected, x, y = tower(1), batch(8, 3), batch(8, 4)
    (SimpleContrastiveLoss()(expected(x), expected(y)) + expected(x).square().mean()).backward()
    model = tower(1)
    wrapped = DistributedDataParallel(model)
    mine = parts_of([4, 4], rank, x, y)
    cache = GradCache([wrapped, wrapped], 3, DistributedContrastiveLoss())
    for _ in range(2):
        model.zero_grad()
        if how == "around":
            auxiliary = wrapped(mine[0]).square().mean()
            cache(*mine)
            auxiliary.backward()
            continue
        before = wrapped(mine[0]).square().mean() if how == "before" else 0.0
        reps = cache.encode(*mine)
        after = wrapped(mine[0]).square().mean() if how == "after" else 0.0
        (DistributedContrastiveLoss()(*reps) + before + after).backward()
    assert_same_step([expected], [model])


def sharded(rank: int) -> None:
    """FSDP towers, of which only the layers are sharded or the whole as well, chunk by chunk.

    Unequal numbers of chunks, which aborted the job, are refused before anything ran.
    """
    expected, x, y = tower(1), batch(8, 3), batch(8, 4)
    SimpleContrastiveLoss()(expected(x), expected(y)).backward()
    for with_whole in (False, True):
        model = tower(1)
        for layer in [model[0], model[-1], *([model] if with_whole else [])]:
            fully_shard(layer)
        GradCache([model, model], 2, DistributedContrastiveLoss())(*parts_of([4, 4], rank, x, y))
        assert_same_step([expected], [model])
    for evaluates in (False, True):
        ran: list[int] = []
        model = tower(1)
        model.register_forward_pre_hook(lambda module, given, ran=ran: ran.append(len(given[0])))
        fully_shard(model)
        cache = GradCache([model, model], 2, DistributedContrastiveLoss())
        with torch.set_grad_enabled(not evaluates), pytest.raises(ValueError, match="as many chunks in every process"):
            cache(*parts_of([6, 2], rank, x, y))
        assert ran == []


def beside_a_mesh(rank: int, kind: str) -> None:
    """A tower that two processes share, one in memory beside it or a head around it, and a trained temperature."""
    mesh = init_device_mesh("cpu", (2,))
    x, y = batch(8, 3), batch(8, 4)
    expected: list[nn.Module] = [tower(1), tower(2)]
    ours: list[Any] = [OffloadModel(tower(1), "cpu", num_slices=2, checkpoint_activation=True, mesh=mesh), tower(2)]
    losses = Scaled(SimpleContrastiveLoss()), Scaled(DistributedContrastiveLoss())
    if kind == "DistributedDataParallel":
        towers = [ours[0], DistributedDataParallel(ours[1])]
    elif kind == "fully_shard":
        towers = [ours[0], fully_shard(ours[1], mesh=mesh)]
    else:
        if kind == "a wrapper with a head":
            expected[0], ours[0] = (nn.Sequential(one, Shifted(6)) for one in (expected[0], ours[0]))
        towers, expected, ours = [ours[0]] * 2, [expected[0]] * 2, [ours[0]] * 2
    losses[0](expected[0](x), expected[1](y)).backward()
    GradCache(towers, 2, losses[1])(*parts_of([4, 4], rank, x, y))
    assert_same_step([*expected, losses[0]], [*ours, losses[1]])


def hooks(rank: int, how: str) -> None:
    """Hooks of a wrapped tower: a clamp, and an optimizer step behind it."""
    rates, bound = [tower(1), tower(1)], 1e-3
    gradients: list[dict[str, Tensor]] = []
    for k in range(2):  # as DistributedDataParallel: each process's gradient is clamped, then the mean is taken
        model = tower(1)
        model(batch(4, k)).square().sum().backward()
        gradients.append({name: p.grad.clamp(-bound, bound) for name, p in model.named_parameters()})
    with torch.no_grad():
        for name, parameter in rates[0].named_parameters():
            parameter -= 0.5 * (gradients[0][name] + gradients[1][name]) / 2
    steps: list[int] = []

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.5 * parameter.grad
        parameter.grad = None
        steps.append(1)

    for parameter in rates[1].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-bound, bound))
        parameter.register_post_accumulate_grad_hook(step)
    WAYS[how]([DistributedDataParallel(rates[1])], 3 - rank, square, batch(4, rank))
    assert len(steps) == 4
    torch.testing.assert_close(rates[1].state_dict(), rates[0].state_dict())


def hooks_of_shards(rank: int, how: str) -> None:
    """How often hooks of the parameters that FSDP shards run."""
    model = tower(1)
    calls: list[int] = []
    fully_shard(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    WAYS[how]([model], 2, square, batch(4, rank))
    assert len(calls) == 4


class Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {}


def ranking(rank: int, guided: bool = False, **options: Any) -> None:
    """A loss of sentence-transformers over the rows of both processes, as many as they are."""
    columns = [batch(8, k) for k in range(3, 6)]
    expected, model, guide = Sentences(), Sentences(), Sentences()
    for each in (expected, model, guide):
        each.tokenizer = Tokenizer()  # type: ignore[assignment]
    guide.encoder = tower(2)
    kind: Any = partial(CachedGISTEmbedLoss, guide=guide) if guided else CachedMultipleNegativesRankingLoss
    value = kind(expected, mini_batch_size=3, **options)([{"input_ids": column} for column in columns])
    value.backward()
    loss = kind(model, mini_batch_size=2, gather_across_devices=True, **options)
    loss.model = DistributedDataParallel(model)
    mine = loss([{"input_ids": column} for column in parts_of([5, 3], rank, *columns)])
    mine.backward()
    assert abs(float(mine) - float(value)) < 1e-5
    assert_same_step([expected], [model])


DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
RANKINGS: list[dict[str, Any]] = [
    {},
    {"directions": DIRECTIONS},
    {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    *(
        {"hardness_mode": mode, "hardness_strength": 4.0}
        for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")
    ),
]


CLAIMS: dict[str, Callable[[int], None]] = {
    "the loss and gradient are the single process's": partial(compare, rows=[4, 4], chunk=2, negatives=0),
    "also for uneven last batches": partial(compare, rows=[5, 2], chunk=2, negatives=1),
    "also for tied towers": partial(compare, rows=[3, 5], chunk=2, negatives=0, tied=True),
    "also for a static graph": partial(compare, rows=[4, 4], chunk=3, negatives=0, static=True),
    "another use of a static graph comes first or is refused": static_graph_beside_steps,
    "also by tiles": partial(compare, rows=[5, 3], chunk=2, negatives=1, tiles=2),
    "also for a learnable temperature": partial(compare, rows=[3, 4], chunk=1, negatives=0, temperature=True),
    "targets of all queries count once where one process has all queries": targets_of_queries_that_one_process_has,
    "a tower unused in one process counts zero there": unused_parameters_and_gradients_of_before,
    "a training step begins with the buffers of rank 0": buffers_follow_rank_0,
    "decorators gather over processes of different sizes": functional,
    "bfloat16 gradients of many chunks are summed in 32 bits": narrow,
    **{
        f"what a {spelling} trains as {kind} is averaged": partial(head, spelling=spelling, kind=kind)
        for kind in ("loss_fn", "get_rep_fn", "process_fn")
        for spelling in SPELLINGS
    },
    "a trained tensor that cannot be found is refused": hidden_parameter_is_refused,
    **{f"hooks run once, in {how}": partial(hooks, how=how) for how in ("step", "encode")},
    **{f"hooks of shards run once, in {how}": partial(hooks_of_shards, how=how) for how in ("step", "encode")},
    **{
        f"another forward of the wrapper {how} takes part": partial(other_forward_of_the_wrapper, how=how)
        for how in ("before", "after", "around")
    },
    "sharded towers train or are refused before anything ran": sharded,
    **{
        f"a model with a mesh beside {kind}": partial(beside_a_mesh, kind=kind)
        for kind in ("DistributedDataParallel", "fully_shard", "the same tower", "a wrapper with a head")
    },
    "an offloaded tower in a wrapper is refused": offloaded_tower_in_a_wrapper,
    **{f"ranking over all processes {k}": partial(ranking, **options) for k, options in enumerate(RANKINGS)},
    # Other anchors count in their own process alone.
    "a guide over all processes leaves out candidates of the whole batch": partial(
        ranking, guided=True, temperature=0.2, contrast_anchors=False
    ),
}


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    failures = {}
    for name, claim in CLAIMS.items():
        try:
            claim(rank)
            failures[name] = ""
        except BaseException:  # a failure of pytest is no Exception
            failures[name] = traceback.format_exc()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(failures))
