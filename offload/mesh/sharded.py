"""The parameters that users see with a mesh: DTensors whose local part is the home.

Outside of forward and backward the layers hold the DTensors; in a pass they hold the whole plain tensors. An optimizer,
``clip_grad_norm_``, an average, ``state_dict()`` or ``torch.distributed.checkpoint`` therefore work on stored values
without knowing of homes.

Gradients of DTensors are set by users, too (``zero_grad``, clipping). So they are taken over before each pass and each
step, and shown again after each pass.

Updates stay pending only while no other code holds a DTensor, since reading its values asks no model. As
without a mesh, references are counted; the model counts its own ones when it makes them.

Before passes ranks compare words: one for a parameter or for a step of an optimizer, equal on all ranks if that is.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.mesh.gradients import LocalSums, exchange_bytes, means_of_whole
from offload.mesh.parts import Part, WholePart
from offload.mesh.ranks import HOST, Ranks
from offload.mesh.shard import MeshShard, without_memory
from offload.mesh.traffic import ExchangeBytes, bytes_beside_one_process
from offload.public_parameters import PublicParameters
from offload.storage.buffer import on_own_storage
from offload.streaming.graph_references import BY_GRAPHS
from offload.streaming.lane import error_context
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice
from offload.streaming.stored_gradients import set_gradient
from pipe.torch_private.autograd import has_hooks
from pipe.torch_private.tensors import native_uses, storage_uses

if TYPE_CHECKING:
    from offload.streaming.optimizers import ModelOptimizer

__all__ = ["MeshParameters", "ShownParameter", "described", "resident_parts"]


def described(part: Part) -> str:
    """A parameter in one word."""
    return f"{part.name}{list(part.shape)}{str(part.dtype).removeprefix('torch.')}".replace(" ", "")


def described_step(optimizer: ModelOptimizer, gradients: Sequence[int]) -> str:
    """Class and options of a step in one word; ``gradients``: of each group, how many parameters have one."""
    words = [optimizer.factory.kind.__name__, f"max_norm={optimizer.max_norm}"]
    for group, count in zip(optimizer.param_groups, gradients, strict=True):
        words.append(f"gradients={count}of{len(group['params'])}")
        words += [f"{key}={_plain(value)}" for key, value in sorted(group.items()) if key != "params"]
    return f"step({','.join(words)})".replace(" ", "")


def _plain(value: object) -> str:
    """A value that is the same text on all ranks if it is equal: the type only where the text may be an address."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_plain, value))})"
    known = value is None or isinstance(value, (bool, int, float, str))
    return str(value) if known else type(value).__name__


#: Owners in C++ of a parameter that graphs have: its Python object, and what adds to its gradient.
_WITH_A_GRAPH = 2


@dataclass(eq=False)
class ShownParameter:
    """One parameter in its three forms."""

    stored: nn.Parameter
    whole: nn.Parameter
    shown: nn.Parameter
    part: Part
    #: The stored gradient and the DTensor that shows it, and the model's own references to them.
    gradient: tuple[Tensor | None, Tensor | None] = None, None
    gradient_references: tuple[object, ...] = ()
    #: By name of a state of an optimizer: what is stored, and the DTensor that shows it.
    states: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def resident_parts(resident: Shard, ranks: Ranks) -> dict[nn.Parameter, tuple[Shard, Slice, Part]]:
    """Stores what ``resident`` owns in parameters of their own; the layers' parameters lose their memory.

    All ranks get the values of the first one. Returns where each parameter of the layers is stored.
    """
    found: dict[nn.Parameter, tuple[Shard, Slice, Part]] = {}
    for k, s in enumerate(resident.own):
        whole, home = s.parameter, resident.home_view(s)
        home.copy_(ranks.copied_from_first(home))
        one = nn.Parameter(home, whole.requires_grad)
        one.grad, whole.grad = whole.grad, None
        part = WholePart.of(s.name, whole, ranks.count)
        resident.own[k] = replace(s, parameter=one)
        found[whole] = resident, resident.own[k], part
        whole.data = without_memory(whole)
    return found


def _refuse_leaf(parameter: Tensor) -> None:
    raise RuntimeError(
        f"a gradient of this rank reached a parameter of shape {tuple(parameter.shape)} outside of the blocks by "
        f"another way than its module, so it would not be summed over ranks; let the forward take the parameter from "
        f"its module (module.weight), where the model has it in each pass"
    )


class MeshParameters(PublicParameters):
    """With a mesh, users see DTensors for what ``shards`` store, and for what each rank stores whole."""

    sharded = True
    ranks: Ranks
    _shards: Sequence[MeshShard]

    def __init__(
        self,
        shards: Sequence[MeshShard],
        ranks: Ranks,
        resident: Mapping[nn.Parameter, tuple[nn.Parameter, Part]],
        sums: LocalSums,
    ) -> None:
        """``resident``: for parameters of layers that each rank stores whole, the stored ones."""
        self._shards, self._sums = shards, sums
        self.ranks = ranks
        self._all: list[ShownParameter] = []
        #: By each of their three forms.
        self._forms: dict[nn.Parameter, ShownParameter] = {}
        #: Where modules hold parameters. Recurrent layers follow their registers themselves.
        self._places: list[tuple[dict[str, Any], str, ShownParameter]] = []
        modules = dict.fromkeys(m for shard in shards for layer in shard.layers for m in layer.modules())
        stored = [
            (s.parameter, here.parameter, part)
            for shard in shards
            for s, here, part in zip(shard.own, shard.slices, shard.parts, strict=False)
        ]
        self._add([*stored, *((one, p, part) for p, (one, part) in resident.items())], modules)
        for shard in shards:
            shard.shown.update((there.parameter, self.of(there)) for there in shard.at_home)
        #: Number of running contexts in which layers hold whole parameters.
        self._inside = 0
        #: What optimizers did since ranks have last compared it.
        self._steps: list[str] = []
        self._show()
        self.recount()
        self._known_homes = [0 if shard.home is None else shard.count_home_owners() for shard in shards]
        self._outside: list[ShownParameter] = []
        largest = max((sum(p.nbytes for p in shard.parameters) for shard in shards), default=0)
        self.buffer_bytes = bytes_beside_one_process(largest, ranks.count) if ranks.transport is HOST else 0

    def recount(self, *_: Any) -> None:
        """Counts the engine's own references to DTensors anew."""
        self._known = self._references(Counter(p.shown for p in self._all))

    def _add(
        self, parameters: Iterable[tuple[nn.Parameter, nn.Parameter, Part]], modules: Iterable[nn.Module]
    ) -> list[ShownParameter]:
        """Shows DTensors of parameters, given as they are stored and as ``modules`` hold them."""
        new = [ShownParameter(one, whole, self._new(one, whole, part), part) for one, whole, part in parameters]
        self._all += new
        self._forms.update((form, p) for p in new for form in (p.stored, p.shown, p.whole))
        self._places += [
            (module._parameters, key, self._forms[p])
            for module in modules
            for key, p in module._parameters.items()
            if p is not None
        ]
        return new

    def _new(self, stored: nn.Parameter, whole: nn.Parameter, part: Part) -> nn.Parameter:
        # ``async_save`` of torch copies storages: of a view it would copy the home of the whole shard, and it fails for
        # a DTensor whose local part does not begin with its storage.
        shown = nn.Parameter(self._wrap(on_own_storage(stored.detach()), part), stored.requires_grad)
        vars(shown).update({key: value for key, value in vars(whole).items() if key not in vars(shown)})
        return shown

    def _wrap(self, local: Tensor, part: Part) -> Tensor:
        """A DTensor whose local part shares the memory of ``local``."""
        from torch.distributed.tensor import DTensor

        wrapped: Tensor = DTensor.from_local(
            local,
            self.ranks.mesh_of(local),
            self._placements(part),
            run_check=False,
            shape=torch.Size(part.shape),
            stride=part.stride,
        )
        return wrapped

    def _placements(self, part: Part) -> list[Any]:
        from torch.distributed.tensor import Replicate, Shard

        replicas = [Replicate()] * (self.ranks.dimensions - 1)
        return [*replicas, Replicate() if isinstance(part, WholePart) else Shard(0)]

    def of(self, s: Slice) -> nn.Parameter:
        """The DTensor of a stored parameter."""
        return self._forms[s.parameter].shown

    def for_autograd(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The DTensors: else a request for their gradients would find no graph, and pass for "there is none"."""
        return [self._forms[p].shown if p in self._forms else p for p in parameters]

    def refuse_requests(self, requested: Sequence[nn.Parameter]) -> None:
        """Raises RuntimeError: gradients of DTensors are stored, and never returned."""
        names = [self._forms[p].part.name for p in requested if p in self._forms]
        if names:
            raise RuntimeError(
                f"gradients of parameters are requested ({', '.join(names[:3])}), by torch.autograd.grad, inputs= or a "
                f"hook; with mesh= they are summed over ranks and stored in .grad: call backward() without inputs=. "
                f"Of the schedules of torch.distributed.pipelining take one without a backward for weights alone "
                f"(Schedule1F1B, ScheduleInterleaved1F1B)"
            )

    # --- before and after passes ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which modules hold whole parameters, and gradients are the stored ones. May be nested."""
        if not self._inside:
            self.take_gradients()
        self._inside += 1
        try:
            if self._inside == 1:
                for register, key, p in self._places:
                    register[key] = p.whole
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._show()

    def _show(self) -> None:
        for register, key, p in self._places:
            register[key] = p.shown
        new = []
        for p in self._all:
            gradient = p.stored.grad
            if gradient is None:
                p.shown.grad = None
            elif self._shown_gradient(p) is not gradient:
                p.gradient = gradient, self._wrap(gradient.detach(), replace(p.part, dtype=gradient.dtype))
                set_gradient(p.shown, p.gradient[1])
                new.append(p)
        gradient = None
        for p in new:
            p.gradient_references = self._gradient_references(p)

    def _shown_gradient(self, p: ShownParameter) -> Tensor | None:
        """The stored gradient that the DTensor's ``.grad`` shows, if it is the one that was shown last."""
        stored, shown = p.gradient
        return stored if p.shown.grad is shown else None

    def take_gradients(self) -> None:
        """Takes over gradients that were set, replaced or removed."""
        for p in self._all:
            gradient = p.shown.grad
            if gradient is None:
                p.stored.grad, p.gradient = None, (None, None)
            elif (known := self._shown_gradient(p)) is not None:
                set_gradient(p.stored, known)
            else:
                local = self._local_gradient(p, gradient)
                set_gradient(p.stored, local)
                p.gradient, p.gradient_references = (local, gradient), ()

    @staticmethod
    @torch.no_grad()
    def _references(tensors: Iterable[Any]) -> dict[int, tuple[int, ...]]:
        """References to each DTensor, and to its local part and by views of that; by ``id`` of the DTensor."""
        found: dict[int, tuple[int, ...]] = {}
        for tensor in tensors:
            local = tensor.to_local()
            of_local = sys.getrefcount(local), native_uses(local), storage_uses(local)
            found[id(tensor)] = sys.getrefcount(tensor), weakref.getweakrefcount(tensor), *of_local
        return found

    def _gradient_references(self, p: ShownParameter) -> tuple[object, ...]:
        stored, shown = p.gradient
        # Users of its memory as well: to_local() returns another view each time.
        assert stored is not None
        return sys.getrefcount(stored), storage_uses(stored), *self._references([shown]).values()

    def held_elsewhere(self, references: Counter[nn.Parameter]) -> bool:
        """Whether other code holds DTensors, their gradients or views of homes, and may read them at any time.

        ``references``: the parameters to check, and how often optimizers hold each.
        """
        now = self._references(references)
        # A graph, such as that of a loss which is still there, has a leaf but not its value: one more owner in C++. A
        # graph that has saved the value is another owner.
        in_graphs = {id(shown): BY_GRAPHS if native_uses(shown) == _WITH_A_GRAPH else 0 for shown in references}
        for key, held in [(id(shown), held) for shown, held in references.items()]:
            count, *others = self._known[key]
            if now[key] != (count + held + in_graphs[key], *others):
                return True
        for p in (self._forms[shown] for shown in references):
            if p.shown.grad is not None and (
                self._shown_gradient(p) is None or self._gradient_references(p) != p.gradient_references
            ):
                return True
        return any(
            shard.home is not None and shard.count_home_owners() != uses
            for shard, uses in zip(self._shards, self._known_homes, strict=True)
        )

    def _local_gradient(self, p: ShownParameter, gradient: Any) -> Tensor:
        placements = tuple(self._placements(p.part))
        if getattr(gradient, "placements", None) != placements:
            raise RuntimeError(
                f"expected a gradient of {p.part.name} as a DTensor with the placements {placements} of the parameter, "
                f"got {getattr(gradient, 'placements', type(gradient).__name__)}; redistribute it before you set it"
            )
        local: Tensor = gradient.to_local()
        return local

    def take_settings(self) -> None:
        """Takes over ``requires_grad``. Raises RuntimeError for hooks on gradients."""
        hooked = []
        for p in self._all:
            if has_hooks(p.shown):
                hooked.append(p.part.name)
            p.stored.requires_grad_(p.shown.requires_grad)
            p.whole.requires_grad_(p.shown.requires_grad)
        if hooked:
            raise RuntimeError(
                f"parameters have gradient hooks ({', '.join(hooked[:3])}), which would never run with mesh=: "
                f"gradients are stored shard by shard. Remove the hooks"
            )

    def accumulates(self) -> contextlib.AbstractContextManager[None]:
        """See :meth:`PublicParameters.accumulates`."""
        return self._sums.kept()

    def drop_sums(self, parameters: Iterable[nn.Parameter]) -> None:
        """See :meth:`PublicParameters.drop_sums`."""
        self._sums.drop({self._forms[p].stored for p in parameters if p in self._forms})

    # --- agreement of ranks ---------------------------------------------------------------------------------------

    def check_model(self) -> None:
        """Compares names, shapes and cuts of parameters, and what all are computed with, over all ranks.

        Raises RuntimeError on all if they differ.
        """
        words = [f"gradient_divide_factor={self.ranks.divide_factor}"]
        for shard in self._shards:
            words.append(f"{shard.index}:{','.join(map(described, shard.parts))}")
            dtypes = dict.fromkeys(str(s.dtype) for s in shard.slices)
            words.append(f"computed-in:{','.join(dtypes)};gradients-in:{shard.gradient_types.dtype}")
        self.ranks.agree("the construction of the model", " ".join(words))

    def begin_forward(self, words: str) -> None:
        """Compares what decides the collectives of a forward over all ranks. Raises RuntimeError on all otherwise."""
        self._agree("a forward", words)

    def begin_backward(self, words: str, place: int, *, stores: bool) -> int:
        """The same for the backward of one forward. Returns the greatest ``place`` of any rank."""
        found = [f"{'stores' if stores else 'drops'} {self._sums.described()} {words}"]
        found += [p.part.name + "+gradient" * (p.stored.grad is not None) for p in self._all if p.whole.requires_grad]
        return int(max(self._agree("a backward", " ".join(found), place)))

    def leave_order(self, name: str, place: int) -> None:
        """Compares a call of a block in another order than before. Raises RuntimeError on all if one differs."""
        self.ranks.agree("a call of a block in a new order", f"call {place} {name}")

    @property
    def kept(self) -> list[MeshShard]:
        """The shards of which the present backward reduces sums that earlier ones have kept."""
        return [] if self._sums.keeps else self._sums.shards

    def _agree(self, what: str, words: str, number: float = 0.0) -> list[float]:
        found = self.ranks.agree(what, " ".join((*self._steps, words)), number, everywhere=True)
        self._steps.clear()  # not if they differ: then ranks have different weights, and every later pass raises
        return found

    # --- optimizers -----------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: ModelOptimizer) -> None:
        """Takes over gradients, and what a ``GradScaler`` found in them: all ranks skip a step, or none."""
        if self._sums:
            raise RuntimeError(
                "gradients of backwards in accumulate() were not reduced yet: run the last backward before step() "
                "outside of it, or drop them by zero_grad()"
            )
        found: Tensor | None = getattr(optimizer, "found_inf", None)
        if found is not None:
            everywhere = self.ranks.agree("a step with a GradScaler", "", float(found))
            optimizer.found_inf = torch.full_like(found, max(everywhere))  # type: ignore[attr-defined]
        self.take_gradients()

    def note_step(self, optimizer: ModelOptimizer) -> None:
        """Notes class, options, and how many parameters have gradients: ranks compare them at the next pass."""
        counts = [sum(self._forms[p].stored.grad is not None for p in g["params"]) for g in optimizer.param_groups]
        self._steps.append(described_step(optimizer, counts))

    def local(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The stored parameters of DTensors; of those that each rank stores whole, on the first rank of a row only."""
        found = [self._forms[p] for p in parameters]
        return [p.stored for p in found if not (isinstance(p.part, WholePart) and self.ranks.rank)]

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm of all gradients, from that of this rank's parts; a sum in rank order, equal on all ranks."""
        squares = self.ranks.agree("the norm of gradients", "", float(norm) ** 2)
        return torch.tensor(math.sqrt(sum(squares)), dtype=norm.dtype)

    def show_state(self, s: Slice, state: dict[str, Any]) -> dict[str, Any]:
        """The state with a DTensor for each tensor that has an element for each of the parameter."""
        p = self._forms[s.parameter]
        known, shown = p.states, {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == p.stored.shape:
                if key not in known or known[key][0] is not value:
                    known[key] = value, self._wrap(on_own_storage(value), replace(p.part, dtype=value.dtype))
                shown[key] = known[key][1]
            else:
                shown[key] = value
        return shown

    def stored_state(self, s: Slice, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of a state: of DTensors, or of tensors of the whole parameter's shape."""
        p = self._forms[s.parameter]
        begin, end = p.part.span(self.ranks.rank)
        found = {}
        for key, value in state.items():
            if hasattr(value, "to_local"):
                value = value.to_local()
            elif isinstance(value, Tensor) and value.dim() and tuple(value.shape) == p.part.shape:
                value = value[begin:end]
            found[key] = value
        return found

    # --- what each rank stores whole ----------------------------------------------------------------------------------

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stored parameter of a DTensor."""
        return self._forms[parameter].stored

    def replicate(self, named: Mapping[str, nn.Parameter], modules: Iterable[nn.Module]) -> None:
        """Shows DTensors of parameters that each rank stores whole; all get the values of the first rank.

        Raises RuntimeError on all ranks if their names or shapes differ.
        """
        parts = {name: WholePart.of(name, p, self.ranks.count) for name, p in named.items()}
        self.ranks.agree("what is outside of the blocks", " ".join(map(described, parts.values())))
        for p in named.values():
            gradient, p.grad = p.grad, None
            p.data = self.ranks.copied_from_first(p)
            p.grad = gradient
        self._outside = self._add([(p, p, parts[name]) for name, p in named.items()], modules)
        self._show()
        self.recount()

    def refuse_leaves(self) -> None:
        """Lets autograd refuse gradients that reach parameters outside of blocks by another way than their modules."""
        for p in self._outside:
            if p.stored.requires_grad:
                p.stored.register_post_accumulate_grad_hook(_refuse_leaf)

    @contextlib.contextmanager
    def outside_as(self, values_of: Callable[[list[ShownParameter]], Sequence[Tensor]]) -> Iterator[None]:
        """A context in which modules outside of blocks have ``values_of`` trained parameters in place of these."""
        trained = [p for p in self._outside if p.whole.requires_grad]
        values = dict(zip(trained, values_of(trained), strict=True))
        places = [(register, key, p) for register, key, p in self._places if p in values]
        try:
            for register, key, p in places:
                register[key] = value = values[p]
                value._is_param = True
            yield
        finally:
            for register, key, p in places:
                register[key] = p.whole

    def store_replicated(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Adds the means over ranks of gradients of what each rank stores whole to the stored ones; empties the dict.

        All ranks call it with as many trained parameters. Raises RuntimeError for a sparse gradient.
        """
        for name in [self._forms[p].part.name for p, g in gradients.items() if g.layout is not torch.strided]:
            raise RuntimeError(
                f"the gradient of {name} is sparse, which is not supported with mesh=; use a layer with sparse=False"
            )
        if self._sums.keeps:
            self._sums.keep(None, gradients)
            return
        found, trained = self._sums.with_kept(None, gradients), self._trained_whole()
        gradients.clear()
        given = [found.pop(p.stored, None) for p in trained]
        if not trained:
            return
        means: list[Tensor | None] = []
        parts, ranks = [p.part for p in trained], self.ranks
        arrival = ranks.lane.submit("R-outside", lambda: means.extend(means_of_whole(parts, given, ranks)))
        with error_context("reducing gradients of what each rank stores whole"):
            # Lane of ranks -> host. Without this, the gradients are read before they are there.
            arrival.synchronize()
        for p, mean in zip(trained, means, strict=False):
            if mean is None:
                continue
            ranks.transport.use(mean)
            if p.stored.grad is None:
                p.stored.grad = mean
            else:
                p.stored.grad.add_(mean)

    def _trained_whole(self) -> list[ShownParameter]:
        """What each rank stores whole and trains."""
        return [p for p in self._all if isinstance(p.part, WholePart) and p.stored.requires_grad]

    def exchange_bytes(self) -> ExchangeBytes | None:
        """See :meth:`PublicParameters.exchange_bytes`."""
        if self.ranks.transport is HOST:
            return None
        return exchange_bytes(self._shards, [p.part for p in self._trained_whole()], self.ranks)

    def compare(self, what: str, number: float) -> list[float]:
        """See :meth:`PublicParameters.compare`. Raises RuntimeError on all ranks if they begin different calls."""
        return self.ranks.agree(what, "", number, everywhere=True)
