"""Quantised weights of several makes, without the libraries that make them, and models whose bases are quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer

WIDTH = 16

#: Shared by all parameters of one make, as a library does with its tables.
TABLE = torch.linspace(-1.0, 1.0, 255)


class Packed(Tensor):
    """int8 values and a scale for each row, in a tensor without memory of its own. Saved for backward as it is."""

    data8: Tensor
    scale: Any

    @staticmethod
    def __new__(cls, data8: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, data8.shape, dtype=torch.float32, device=data8.device)

    def __init__(self, data8: Tensor, scale: Tensor) -> None:
        self.data8, self.scale = data8, scale

    @staticmethod
    def pack(weight: Tensor) -> Any:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return Packed((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(parts["data8"], parts["scale"])

    def dequantised(self) -> Tensor:
        return self.data8.float() * self.scale

    def parts(self) -> list[Any]:
        return [self.data8, self.scale]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.detach.default:
            return cls(*map(torch.Tensor.detach, args[0].parts()))
        if func is aten.clone.default:  # as a library may: by quantising again, to other values
            return cls(args[0].data8 + 1, args[0].scale.clone())
        if func is aten.copy_.default:
            for mine, other in zip(args[0].parts(), args[1].parts(), strict=True):
                mine.copy_(other)
            return args[0]
        raise NotImplementedError(str(func))


class Nested(Packed):
    """Its scales are quantised, too."""

    @staticmethod
    def pack(weight: Tensor) -> Any:
        flat = Packed.pack(weight)
        return Nested(flat.data8, Packed.pack(flat.scale.reshape(1, -1)))

    def dequantised(self) -> Tensor:
        return self.data8.float() * self.scale.dequantised().reshape(-1, 1)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


class Statistics:
    """What a parameter with attributes needs besides its bytes."""

    def __init__(self, scale: Tensor) -> None:
        self.scale, self.table = scale, TABLE


class WithAttributes(nn.Parameter):
    """Bytes of its own, an attribute on the same bytes, and statistics in another object."""

    same: Tensor | None
    statistics: Statistics

    @staticmethod
    def pack(weight: Tensor) -> Any:
        packed = Packed.pack(weight)
        made = Tensor._make_subclass(WithAttributes, (packed.data8.int() + 127).to(torch.uint8), False)
        made.same, made.statistics = made.data, Statistics(packed.scale)
        return made

    def dequantised(self) -> Tensor:
        return self.statistics.table[self.long()] * 127 * self.statistics.scale

    def __deepcopy__(self, memo: Any) -> Any:
        made = Tensor._make_subclass(WithAttributes, self.data.clone(), False)
        made.same, made.statistics = made.data, Statistics(self.statistics.scale.clone())
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.data.clone(), self.statistics.scale.clone())


def _rebuilt(data: Tensor, scale: Tensor) -> Any:
    made = Tensor._make_subclass(WithAttributes, data, False)
    made.same, made.statistics = made.data, Statistics(scale)
    return made


KINDS: dict[str, Any] = {"subclass": Packed, "nested subclass": Nested, "attributes": WithAttributes}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.weight = weight if isinstance(weight, WithAttributes) else None
        return x @ weight.dequantised().t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        return gradient @ (saved if ctx.weight is None else ctx.weight).dequantised(), None


class Quantised(nn.Module):
    """A linear layer."""

    def __init__(self, kind: Any, weight: Tensor) -> None:
        super().__init__()
        packed = kind.pack(weight)
        self.weight = packed if isinstance(packed, nn.Parameter) else nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Product.apply(x, self.weight)
        return out


class Block(nn.Module):
    """A frozen, quantised base with an adapter."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.base = Quantised(kind, torch.randn(WIDTH, WIDTH) / 4)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.frozen(x) + self.up(self.down(x)))


class Tower(nn.Module):
    """Calls its blocks in a forward of its own; what it ends with is quantised as well."""

    def __init__(self, kind: Any, blocks: int = 4) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(kind) for _ in range(blocks))
        self.head = Quantised(kind, torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layer:
            x = block(x)
        return self.head(x)


def layers(kind: str, blocks: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(KINDS[kind]) for _ in range(blocks)))


def tower(kind: str, seed: int = 0) -> Tower:
    torch.manual_seed(seed)
    return Tower(KINDS[kind])


def plain_values(value: Any) -> list[Tensor]:
    """The plain tensors of a value of a ``state_dict()``."""
    if isinstance(value, Packed):
        return [plain for part in value.parts() for plain in plain_values(part)]
    return [value]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    assert [k for k, (a, b) in enumerate(zip(first, second, strict=True)) if not torch.equal(a, b)] == []


def train(model: Any, steps: int = 3, width: int = WIDTH) -> list[Tensor]:
    """Outputs and gradients of some steps, outputs without gradients, and the trained values after them."""
    kind, options = torch.optim.AdamW, {"lr": 0.01, "fused": True}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = (
        OffloadOptimizer(model, kind, **options) if isinstance(model, OffloadModel) else kind(trained, **options)
    )
    seen = []
    for k in range(steps):
        y = model(torch.randn(3, width, generator=torch.Generator().manual_seed(k)))
        y.square().sum().backward()
        seen += [y.detach().clone(), *(p.grad.clone() for p in trained)]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen += [model(torch.ones(1, width)), model.eval()(torch.ones(1, width))]
    model.train()
    return seen + [p.detach().clone() for p in trained]
