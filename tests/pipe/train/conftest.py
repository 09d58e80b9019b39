"""What the tests of the train pipelines share: batches of all kinds, a model, a plain loop, and a lane that is late."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipe.nested import tensors_in
from pipe.train import Lane, PrefetchTrainPipelineSparseDist, Ticket, TrainPipelineBase, TrainPipelineSparseDist

PIPELINES = [TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist]
BOTH = pytest.mark.parametrize("make", PIPELINES[:2])

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    x: Tensor
    y: Tensor
    rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.rows += len(self.x)


@dataclass(frozen=True)
class FrozenRecord:
    x: Tensor
    y: Tensor


class WithTo:
    """What torch calls pipelineable: an object with a ``.to`` that takes ``non_blocking``."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: torch.device, non_blocking: bool = False) -> WithTo:
        return WithTo(self.x.to(device, non_blocking=non_blocking), self.y.to(device, non_blocking=non_blocking))


class WithPlainTo(WithTo):
    def to(self, device: torch.device) -> WithPlainTo:  # type: ignore[override]
        return WithPlainTo(self.x.to(device), self.y.to(device))


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tensor": (lambda x, y: torch.cat([x, y], 1), lambda b: (b[:, :-1], b[:, -1:])),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "nested_dict": (
        lambda x, y: {"in": OrderedDict(x=x), "out": {"y": [y, "name"]}},
        lambda b: (b["in"]["x"], b["out"]["y"][0]),
    ),
    "list": (lambda x, y: [x, y], lambda b: (b[0], b[1])),
    "tuple": (lambda x, y: (x, (y, None, 3)), lambda b: (b[0], b[1][0])),
    "named_tuple": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (Record, lambda b: (b.x, b.y)),
    "frozen_dataclass": (FrozenRecord, lambda b: (b.x, b.y)),
    "with_to": (WithTo, lambda b: (b.x, b.y)),
    "with_plain_to": (WithPlainTo, lambda b: (b.x, b.y)),
}


class Net(nn.Module):
    """Draws random numbers and counts in buffers, so that a batch run twice, late or never is seen."""

    def __init__(self, unpack: Callable[[Any], tuple[Tensor, Tensor]] = KINDS["dict"][1]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 1))
        self.unpack = unpack

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = self.unpack(batch)
        output = self.body(x)
        return (output - y) ** 2, output.detach()


class Counting(nn.Module):
    """Notes which batches (numbers) it ran. Its gradient names those that it is made of: batch k adds 10**k."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.ran: list[int] = []

    def forward(self, batch: Tensor) -> tuple[Tensor, int]:
        self.ran.append(int(batch))
        return self.weight * 10.0 ** int(batch), int(batch)


def numbers(*values: int) -> Iterator[Tensor]:
    """An iterator over batches for :class:`Counting`."""
    return iter([torch.tensor(k) for k in values])


def pipeline_of(make: Any, model: nn.Module, **options: Any) -> Any:
    """With plain SGD."""
    return make(model, torch.optim.SGD(model.parameters(), 1.0), "cpu", **options)


class FakeSparse(nn.Module):
    """Speaks the protocol of sharded modules. Its log tells when each half of its forward ran, and on what."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.log: list[tuple[str, int]] = []

    def create_context(self) -> dict[str, Any]:
        return {}

    def input_dist(self, ctx: dict[str, Any], features: Tensor, flip: bool = False) -> SimpleNamespace:
        self.log.append(("input_dist", id(features)))
        ctx["flip"] = flip
        return SimpleNamespace(wait=lambda: self._exchange(features))

    def _exchange(self, features: Tensor) -> SimpleNamespace:
        self.log.append(("exchange", id(features)))
        return SimpleNamespace(wait=lambda: (features, features * 2))

    def count(self, event: str) -> int:
        return [each for each, _ in self.log].count(event)

    def compute_and_output_dist(self, ctx: dict[str, Any], dist_input: tuple[Tensor, Tensor]) -> Tensor:
        features, twice = dist_input[0], dist_input[1]
        assert "used" not in ctx, "a context serves one forward"
        ctx["used"] = True
        self.log.append(("compute", id(features)))
        return (twice.flip(1) if ctx["flip"] else twice) * self.scale

    def forward(self, features: Tensor, flip: bool = False) -> Any:
        self.log.append(("forward", id(features)))
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, features, flip).wait().wait())


class FakeCached(FakeSparse):
    """Prefetches rows into a cache that hands them out in the order in which they came, as fbgemm's do."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: list[int] = []

    def prefetch(
        self, dist_input: tuple[Tensor, Tensor], forward_stream: Any = None, ctx: dict[str, Any] | None = None
    ) -> None:
        assert forward_stream is None, "there is no stream on the CPU"
        assert ctx is not None
        assert "used" not in ctx
        self.log.append(("prefetch", id(dist_input[0])))
        self.cache.append(id(dist_input[0]))

    def compute_and_output_dist(self, ctx: dict[str, Any], dist_input: tuple[Tensor, Tensor]) -> Tensor:
        if self.cache:
            assert self.cache.pop(0) == id(dist_input[0]), "rows of another batch"
        return super().compute_and_output_dist(ctx, dist_input)


class SparseNet(nn.Module):
    """A model with a module that distributes its input, inside other modules; ``use`` calls it."""

    def __init__(
        self,
        sparse: Callable[[], nn.Module] = FakeSparse,
        use: Callable[[Any, Any], Any] = lambda self, batch: self.inner["sparse"](batch["x"], flip=True),
    ) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"sparse": sparse()})
        self.net, self.use, self.calls = Net(lambda batch: batch), use, 0

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.net((self.use(self, batch), batch["y"]))  # type: ignore[no-any-return]


class LateLane(Lane):
    """Holds every job back until its ticket is waited for: the twin of a stream that is as slow as it may be.

    A consumer that forgets to wait finds nothing done, every time. Jobs run in order when the last of them is waited
    for, as on a stream.
    """

    def __init__(self) -> None:
        self.held: list[tuple[Callable[[], Any], LateTicket]] = []

    def submit(self, job: Callable[[], Any]) -> Ticket[Any]:
        ticket = LateTicket(self)
        self.held.append((job, ticket))
        return ticket

    def run_until(self, last: LateTicket) -> None:
        while not last.done:
            job, ticket = self.held.pop(0)
            ticket.run(job)


class LateTicket(Ticket[Any]):
    def __init__(self, lane: LateLane) -> None:
        super().__init__()
        self.lane = lane

    def succeeded(self) -> bool:
        self.lane.run_until(self)
        return super().succeeded()


class Lab:
    """One experiment: the same model, batches and optimizer, once in a plain loop and once in a pipeline."""

    def __init__(self) -> None:
        self._plain: dict[Any, Any] = {}

    def model(self, kind: str = "dict", seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return Net(KINDS[kind][1])

    def sparse_model(self, sparse: Callable[[], nn.Module] = FakeSparse, seed: int = 0) -> SparseNet:
        torch.manual_seed(seed)
        return SparseNet(sparse)

    def batches(self, count: int, kind: str = "dict", seed: int = 1) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        pack = KINDS[kind][0]
        return [
            pack(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)
        ]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # Linear in the gradient: Adam would blow up the rounding of a gradient that is zero (a bias before BatchNorm).
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def plain_loop(
        self,
        model: nn.Module,
        epochs: Iterable[list[Any]],
        grad_accum: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> list[Any]:
        """The meaning of it all: for each window, the mean over its batches."""
        optimizer = optimizer or self.optimizer(model)
        size, outputs = grad_accum or 1, []
        for batches in epochs:
            for start in range(0, len(batches), size):
                window = batches[start : start + size]
                optimizer.zero_grad()
                for batch in window:
                    losses, output = model(batch)
                    (torch.stack([each.sum() for each in tensors_in(losses)]).sum() / len(window)).backward()
                    outputs.append(output)
                optimizer.step()
        return outputs

    def run(self, pipeline: Any, batches: Iterator[Any]) -> list[Any]:
        """The outputs of all batches. An iterator that has ended ends again."""
        outputs = []
        while True:
            try:
                outputs.append(pipeline.progress(batches))
            except StopIteration:
                with pytest.raises(StopIteration):
                    pipeline.progress(batches)
                return outputs

    def assert_same(self, model: nn.Module, reference: nn.Module) -> None:
        torch.testing.assert_close(model.state_dict(), reference.state_dict(), atol=1e-6, rtol=1e-6)

    def check_training(
        self,
        make: Callable[..., Any],
        build: Callable[[], Any],
        epochs: Callable[[], list[list[Any]]],
        grad_accum: int | None = None,
        key: Any = None,
        run: Callable[[Any, Iterator[Any]], list[Any]] | None = None,
    ) -> Any:
        """Trains in a pipeline of ``make`` what ``build`` makes; asserts that a plain loop does the same.

        ``key``: of the plain loop's result, which is worked out once. Gradients from before the first window do not
        leak into it.
        """
        if key is None or key not in self._plain:
            torch.manual_seed(0)
            reference = build()
            torch.manual_seed(2)
            outputs = self.plain_loop(reference, epochs(), grad_accum)
            self._plain[key] = reference, outputs, torch.get_rng_state()
        reference, expected, generator_state = self._plain[key]
        torch.manual_seed(0)
        model = build()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.manual_seed(2)
        pipeline = make(model, self.optimizer(model), "cpu", grad_accum=grad_accum)
        found = [output for batches in epochs() for output in (run or self.run)(pipeline, iter(batches))]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        self.assert_same(model, reference)
        assert torch.equal(torch.get_rng_state(), generator_state)
        return pipeline


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()
