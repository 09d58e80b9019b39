"""A step has the loss and the gradient of the whole batch, whatever its loss divides by, or refuses the loss."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, RUF100

from pipe import NoChunk, Pipe
from tests.gradients import assert_same_step
from tests.pipe.test_pipe import Returns

CLASSES = 5
WEIGHT = torch.tensor([1.0, 10.0, 0.1, 3.0, 5.0], dtype=torch.float64)
LossFn = Callable[[Any, Any], Any]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def indices(rows: int) -> Tensor:
    """Classes, the last third of which is padding: with four micro-batches, the last has nothing else."""
    target = torch.randint(0, CLASSES, (rows,))
    target[2 * rows // 3 :] = -100
    return target


def probabilities(rows: int) -> Tensor:
    return torch.rand(rows, CLASSES, dtype=torch.float64).softmax(1)


def check_step(
    loss_fn: LossFn,
    target: Any,
    *,
    plain: LossFn | None = None,
    rows: int = 9,
    chunks: int = 4,
    checkpoint: str = "except_last",
    **options: Any,
) -> None:
    """One step of a Pipe beside loss and backward of the bare module on the whole batch."""
    bare = model()
    x = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    pipe = Pipe(copy.deepcopy(bare), [1, 2], ["cpu", "cpu"], chunks=chunks, checkpoint=checkpoint)
    pipe[0].weight.grad = torch.ones_like(pipe[0].weight)
    bare[0].weight.grad = torch.ones_like(bare[0].weight)
    loss = pipe.train_step(x, target, loss_fn, **options)
    expected = (plain or loss_fn)(bare(y), target)
    expected.backward()
    torch.testing.assert_close((loss, x.grad), (expected.detach(), y.grad))
    assert_same_step([bare], [pipe], 1e-7)


class Squares(nn.Module):
    """A loss that is not torch's and says how it reduces."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        squares = (output - target).square().sum(1)
        return squares.sum() if self.reduction == "sum" else squares.mean()


def squares(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return Squares(reduction)(output, target)  # type: ignore[no-any-return]


BY_TARGETS: dict[str, tuple[LossFn, Callable[[int], Any]]] = {
    "padding": (nn.CrossEntropyLoss(), indices),
    "another padding": (nn.CrossEntropyLoss(ignore_index=1), lambda rows: torch.arange(rows) % 2),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), lambda rows: torch.arange(rows) % CLASSES),
    "both": (nn.CrossEntropyLoss(weight=WEIGHT), indices),
    "a class of weight 0": (
        nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1, 1, 1, 1], dtype=torch.float64)),
        lambda rows: torch.arange(rows) // 3,
    ),
    "label smoothing": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2), indices),
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHT), probabilities),
    "negative log likelihood": (nn.NLLLoss(weight=WEIGHT), indices),
    "function": (F.cross_entropy, indices),
    "partial function": (
        functools.partial(F.cross_entropy, weight=WEIGHT, ignore_index=2),
        lambda rows: indices(rows).clamp(min=0),
    ),
    "partial of partial": (functools.partial(functools.partial(F.nll_loss, weight=WEIGHT), ignore_index=-100), indices),
    "a sum over classes": (nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"), indices),
}
DECLARED: list[LossFn] = [
    nn.MSELoss(reduction="sum"),
    functools.partial(F.mse_loss, reduction="sum"),
    Squares("sum"),
    functools.partial(squares, reduction="sum"),
    nn.MSELoss(),
    F.smooth_l1_loss,
    functools.partial(F.huber_loss, delta=0.5),
    nn.KLDivLoss(reduction="batchmean"),
    functools.partial(F.kl_div, reduction="batchmean"),
    nn.BCEWithLogitsLoss(pos_weight=WEIGHT),
    Squares("mean"),
    squares,
]


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
@pytest.mark.parametrize(("loss_fn", "make"), [*BY_TARGETS.values(), *((loss, probabilities) for loss in DECLARED)])
def test_a_loss_that_tells_its_divisor_is_that_of_the_batch(loss_fn: LossFn, make: Any, schedule: str) -> None:
    torch.manual_seed(1)
    check_step(loss_fn, make(9), schedule=schedule)


def test_a_batch_of_padding_alone_has_the_loss_of_the_bare_module() -> None:
    pipe = Pipe(model(), [1, 2], chunks=2)
    target = torch.full((4,), -100)
    assert pipe.train_step(torch.randn(4, 4, dtype=torch.float64), target, nn.CrossEntropyLoss()).isnan()


def summed_and_counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
@pytest.mark.parametrize(
    "loss_fn",
    [
        summed_and_counted,
        lambda y, t: (F.cross_entropy(y, t, reduction="sum").reshape(1), int((t != -100).sum())),
        # A count that only the output knows.
        lambda y, t: ((y * (y.detach() > 0)).sum(), (y.detach() > 0).double().sum()),
    ],
)
def test_a_sum_with_its_count_is_the_mean_of_the_batch(loss_fn: LossFn, schedule: str, checkpoint: str) -> None:
    def plain(output: Tensor, target: Tensor) -> Tensor:
        total, count = loss_fn(output, target)
        return total.reshape(()) / count

    target = indices(9)
    for chunks in (1, 4):
        check_step(loss_fn, target, plain=plain, schedule=schedule, chunks=chunks, checkpoint=checkpoint)


class Hidden(nn.Module):
    """Hides a mean."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)


class Counts(nn.Module):
    """Says how often it ran, and draws a random number each time."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + torch.rand(()))


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda y, t: F.mse_loss(y, t),
        lambda y, t: (y - t).square().sum(),
        Hidden(),
        functools.partial(lambda scale, y, t: scale * F.mse_loss(y, t), 2.0),
        nn.L1Loss(reduction="sum").forward,
    ],
)
def test_a_loss_that_does_not_tell_its_divisor_is_refused_and_leaves_no_gradient(loss_fn: LossFn) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Counts(), nn.BatchNorm1d(4)).double()
    pipe = Pipe(layers, [1, 2], chunks=2)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    x, target = torch.randn(8, 4, dtype=torch.float64), torch.zeros(8, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"reduction='mean'.*reduction='sum'.*\(sum, count\)"):
        pipe.train_step(x, target, loss_fn)
    assert all(torch.equal(p, before[name]) for name, p in pipe.named_parameters())
    assert all(p.grad is None for p in pipe.parameters())
    pipe.train_step(x, target, loss_fn, reduction="mean")
    # The loss of a single micro-batch is that of the batch.
    Pipe(model(), [1, 2], chunks=1).train_step(x, torch.zeros(8, CLASSES).double(), loss_fn)


def padded(output: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(output, target, ignore_index=ignore_index, reduction=reduction)


@functools.wraps(F.cross_entropy)
def wrapped(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


@pytest.mark.parametrize("loss_fn", [padded, wrapped])
def test_a_mean_of_a_foreign_loss_that_leaves_targets_out_is_refused_before_a_layer_runs(loss_fn: LossFn) -> None:
    pipe = Pipe(model(), [1, 2], chunks=2)
    with pipe.recording() as trace, pytest.raises(ValueError, match="reduction='mean' with ignore_index"):
        pipe.train_step(torch.randn(4, 4, dtype=torch.float64), torch.arange(4), loss_fn)
    assert not trace
    pipe.train_step(torch.randn(4, 4, dtype=torch.float64), torch.arange(4), functools.partial(padded, reduction="sum"))


@pytest.mark.parametrize(
    ("loss_fn", "reduction", "message"),
    [
        (nn.MSELoss(), "sum", "reduction='mean' as the loss itself declares"),
        (functools.partial(F.mse_loss, reduction="sum"), "mean", "reduction='sum' as the loss itself declares"),
        (functools.partial(F.mse_loss, reduction="none"), None, "reduction='none'"),
        (nn.MSELoss(), "median", "reduction='median'"),
        (lambda y, t: (y.sum(), y), None, "a detached tensor of one element as the count"),
        (lambda y, t: (y, 3), None, "expected loss_fn to return"),
    ],
)
def test_contradictory_loss_arguments_are_refused(loss_fn: LossFn, reduction: str | None, message: str) -> None:
    pipe = Pipe(model(), [1, 2], chunks=2)
    with pytest.raises(ValueError, match=message):
        pipe.train_step(
            torch.randn(4, 4, dtype=torch.float64),
            torch.zeros(4, CLASSES, dtype=torch.float64),
            loss_fn,
            reduction=reduction,
        )
    assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
def test_a_loss_of_its_own_parameters_may_return_a_sum_with_its_count(schedule: str) -> None:
    """All forwards run before the first backward, which needs the count of all of them."""
    head = nn.Linear(CLASSES, CLASSES).double()

    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return summed_and_counted(head(output), target)

    pipe = Pipe(model(), [1, 2], chunks=3)
    x, target = torch.randn(9, 4, dtype=torch.float64), indices(9)
    with pipe.recording() as trace:
        pipe.train_step(x, target, loss_fn, schedule=schedule)
    assert "".join(action.kind for action in trace) == 6 * "F" + 6 * "B"
    got, head.weight.grad = head.weight.grad, None
    total, count = loss_fn(pipe(x), target)
    (total / count).backward()
    torch.testing.assert_close(got, head.weight.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of torch's compiler
def test_a_compiled_loss_tells_its_divisor() -> None:
    check_step(torch.compile(nn.CrossEntropyLoss(), backend="eager"), indices(9))


def test_a_target_that_all_rows_share_is_not_cut() -> None:
    scale, target = torch.full((3,), 2.0, dtype=torch.float64), torch.randn(8, CLASSES, dtype=torch.float64)

    def loss_fn(output: Tensor, target: Any) -> Tensor:
        shared = target[1].tensor if isinstance(target[1], NoChunk) else target[1]
        assert shared.shape == (3,)
        return F.mse_loss(output, target[0]) * shared.mean()

    check_step(loss_fn, (target, NoChunk(scale)), rows=8, reduction="mean")


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_step_takes_an_input_that_all_rows_share(checkpoint: str) -> None:
    def masked(own: Any, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return own.layers[0](value[0]) @ value[1], value[1]

    several = [Returns(masked, nn.Linear(4, 4)) for _ in range(2)]
    layers = nn.Sequential(*several, Returns(lambda own, value: value[0] + own.own[0]))
    bare = copy.deepcopy(layers)
    x, target, mask = torch.randn(8, 4), torch.randn(8, 4), torch.randn(4, 4, requires_grad=True)
    loss = Pipe(layers, [1, 2], ["cpu", "cpu"], chunks=3, checkpoint=checkpoint).train_step(
        (x, NoChunk(mask)), target, nn.MSELoss()
    )
    got, mask.grad = mask.grad, None
    expected = F.mse_loss(bare((x, mask)), target)
    expected.backward()
    torch.testing.assert_close((loss, got), (expected.detach(), mask.grad))
    assert_same_step([bare], [layers])
