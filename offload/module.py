"""The ``nn.Module`` methods of an offloaded model: parameter access, ``state_dict``, ``.to()``, copies and pickles.

Guarantees
    * Parameters never leave their homes: methods that would move or cast them raise, those that change nothing and a
      move to the compute device pass.
    * A copy, and an unpickled model, has homes of its own.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn

from offload.arguments import layers_of
from offload.engine.homes import ModelHomes
from offload.engine.structure import Structure
from offload.identities import identities_only
from offload.memory import MemoryArguments
from offload.storage import Tier
from offload.streaming.copies import CopiesOfHomes
from offload.streaming.materialize import Values
from offload.streaming.stored_values import StoredValues, defers_values, stored_values, values_in_full

__all__ = ["ModuleAtHome", "refuse_shallow_copy"]

M = TypeVar("M", bound="ModuleAtHome")

#: Suffixes of the attributes in which ``nn.Module`` keeps hooks and their options.
_OF_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called", "_is_full_backward_hook")


class ModuleAtHome(nn.Module):
    """The ``nn.Module`` part of :class:`~offload.OffloadModel`. Its children are the layers."""

    device: torch.device
    _executor: ModelHomes
    _tier: Tier
    #: Names and modules that do not stream: those outside of the blocks, each without its children.
    _around: Mapping[str, nn.Module] = MappingProxyType({})
    #: Arguments of the constructor besides the layers.
    _arguments: dict[str, Any]

    # --- construction -----------------------------------------------------------------------------------------------

    def _adopt(self, model: Any) -> None:
        """Begins the construction of an offloaded ``model``."""
        nn.Module.__init__(self)

    def _layers_of(self, model: Any, blocks: Any, **choices: Any) -> dict[str, nn.Module]:
        """Names and modules of the layers that stream; refuses ``choices`` that they do not support."""
        return layers_of(model)

    def _names_around(self) -> Collection[str]:
        """Names of the parameters that do not stream."""
        return ()

    def _with_rest(
        self,
        model: Any,
        memory: MemoryArguments,
        *,
        offload_device: object,
        resident: str | Sequence[str] | None,
        staying: Collection[nn.Parameter],
        ranks: int,
        **choices: Any,
    ) -> dict[str, nn.Module] | None:
        """All layers that stream, where ``memory`` is too small for what is around them; None if it is not.

        Arguments as of :class:`~offload.OffloadModel`; ``staying``: what ``resident`` names; ``ranks``: processes that
        store a part each.
        """
        return None

    def _owners(self, model: Any, named: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """Modules whose parameters and buffers, with these names before, are those of the model's ``state_dict``."""
        return named

    def _join(
        self,
        executor: ModelHomes,
        named: dict[str, nn.Module],
        values: Mapping[Tensor, Values],
        undo: Callable[..., Any],
    ) -> None:
        """Connects the module with the executor of its layers; ``undo`` gets what is to be called after a failure.

        ``values``: sources of parameters and buffers.
        """
        # Children under the bare model's names, as in state_dict(). A layer may have the name of a method.
        self._modules.update(named)
        executor.structure = Structure(self._modules)

    # --- state and gradients ---------------------------------------------------------------------------------------

    def _run_blocks_by(self, engine: Any) -> None:
        """Lets the engine run what the model's own forward calls."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch; with ``store_dtype``, copies of what homes store in a form."""
        found = super().state_dict(*args, **kwargs)
        self._show_values(found)
        return found

    def _show_values(self, found: dict[str, Any]) -> None:
        """Replaces what homes store in a form by the values: copies, which later steps do not change."""
        formed = [(shard, s) for shard in self._executor.shards for s in shard.formed]
        if not formed:
            return
        views = {
            k: v
            for k, v in found.items()
            if isinstance(v, Tensor) and not isinstance(v, nn.Parameter) and v.dtype == torch.bfloat16
        }
        if defers_values():
            by_address: dict[int, Any] = {s.parameter.data_ptr(): StoredValues(shard, s) for shard, s in formed}
        else:
            exact = [shard for shard in self._executor.shards if any(s.form and s.form.exact for s in shard.formed)]
            by_address = dict(values_in_full(exact, self._tier))
        for name, view in views.items():
            values = by_address.get(view.data_ptr())
            if values is not None and values.shape == view.shape:
                found[name] = values

    def _store_values(self, state_dict: Any, prefix: str) -> None:
        """Stores values of a ``state_dict()``, as far as homes store them in a form.

        The entries are replaced by what is stored then, so the modules that load them next change no bit.
        """
        if not any(shard.formed for shard in self._executor.shards):
            return
        written: Counter[nn.Parameter] = Counter()
        for name, p in self.named_parameters(remove_duplicate=False):
            stored, value = stored_values(p), state_dict.get(prefix + name)
            if stored is None or not isinstance(value, Tensor) or value.shape != p.shape:
                continue
            stored.write(value.detach())
            state_dict[prefix + name] = p.detach()
            written[p] += 1
        for shard in self._executor.shards:
            if shard.sealed is not None:  # the modules increment each version once
                shard.sealed = tuple(v + written[s.parameter] for s, v in zip(shard.formed, shard.sealed, strict=True))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise ValueError(
                f"expected load_state_dict with assign=False for the OffloadModel {prefix.rstrip('.') or 'itself'!r}, "
                f"got assign=True: values are copied into the homes of its parameters"
            )
        self._store_values(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. A pending update owns its gradients, so only ``set_to_none=False`` has to finish it."""
        with identities_only() if set_to_none else contextlib.nullcontext():
            for layer in self.children():
                layer.zero_grad(set_to_none)
            self._executor.public.drop_sums(self.parameters())

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backwards reduce no gradients over the ranks of ``mesh=``; without one it changes nothing.

        Each rank adds its whole gradients in its host memory, in the types of homes: as many bytes as all parameters
        that train. The first backward outside of the context reduces the sums, so that ``.grad`` is what it would have
        been without, up to rounding, and only that backward sends gradients::

            with model.accumulate():
                for batch in batches[:-1]:
                    loss(model(batch)).backward()
            loss(model(batches[-1])).backward()
            optimizer.step()

        Until then ``.grad`` lacks these gradients: ``step()`` of an ``OffloadOptimizer`` raises RuntimeError. Its
        ``zero_grad()`` and that of the model drop them; that of another optimizer cannot. With ``memory=`` there is no
        room that is not planned, so each backward reduces its gradients.
        """
        if self._executor.steps.planner is not None:
            return contextlib.nullcontext()
        return self._executor.public.accumulates()

    # --- layers by index, as in an nn.Sequential -------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers."""
        return iter(self._layers())

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> nn.Sequential: ...

    def __getitem__(self, index: int | slice) -> nn.Module:
        """A layer; or, for a slice, the layers in an ``nn.Sequential`` that runs them on the host, from their homes.

        Layers cannot be assigned, removed or added: their homes are made once.
        """
        if not isinstance(index, slice):
            return self._layers()[operator.index(index)]
        some = nn.Sequential()
        some._modules.update(
            (str(name), layer) for name, layer in list(self._modules.items())[index] if layer is not None
        )
        return some

    def _layers(self) -> list[nn.Module]:
        return [layer for layer in self._modules.values() if layer is not None]

    # --- moves and copies ---------------------------------------------------------------------------------------

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        """Raises if ``fn`` would move or cast parameters away from their homes; otherwise does nothing.

        A move to the compute device changes nothing: this is where the model computes. Trainers ask for it.
        """
        for dtype in {parameter.dtype for parameter in self.parameters()}:
            probe = torch.empty(0, dtype=dtype)
            result = fn(probe)
            if result.is_shared() and result.device == probe.device:
                raise RuntimeError(
                    "the parameters of an OffloadModel have their homes, and cannot move to shared memory "
                    "(share_memory()); give other processes copies: {k: v.clone() for k, v in state_dict().items()}"
                )
            if result.dtype != dtype or result.device not in (probe.device, self.device):
                raise RuntimeError(
                    f"an OffloadModel's parameters are stored in {self._tier.name} and cannot become {result.dtype} on "
                    f"{result.device}; convert the layers before you wrap them"
                )
        return self

    def _replicate_for_data_parallel(self) -> Any:
        """Called by ``nn.DataParallel``, whose copies would run this object's one executor from several threads."""
        raise RuntimeError(
            "expected one device, got an OffloadModel in nn.DataParallel, whose copies would share its homes. Trainers "
            "make one where they see several GPUs: let them see one (CUDA_VISIBLE_DEVICES=0)"
        )

    def __copy__(self) -> Any:
        """Refused: a shallow copy would share parameters, but an executor runs one model."""
        return refuse_shallow_copy()

    def __deepcopy__(self: M, memo: dict[int, Any]) -> M:
        """Another model with homes of its own."""
        self._refuse_copies()
        with CopiesOfHomes(self._executor.shards):
            layers = {name: copy.deepcopy(layer, memo) for name, layer in self._modules.items()}
        cuts = [len(shard.layers) for shard in self._executor.shards]
        model: M = _rebuild(type(self), layers, cuts, self._arguments, copy.deepcopy(self._state(), memo))
        return model

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as bare layers, with storage of their own, and the arguments that offload them again."""
        self._refuse_copies()
        memo: dict[int, Any] = {}
        with CopiesOfHomes(self._executor.shards, results=True):
            layers = {name: copy.deepcopy(layer, memo) for name, layer in self._modules.items()}
        cuts = [len(shard.layers) for shard in self._executor.shards]
        return _rebuild, (type(self), layers, cuts, self._arguments, self._state())

    def _refuse_copies(self) -> None:
        if self._arguments["store_dtype"] is not None:
            raise TypeError(
                "cannot copy or pickle an OffloadModel with store_dtype=: layers of their own would have rounded "
                "parameters. Save a checkpoint, and load it into another model"
            )
        if self._arguments["mesh"] is not None:
            raise TypeError(
                "cannot copy or pickle an OffloadModel with mesh=: each rank stores a part of it. Save it by "
                "torch.distributed.checkpoint, or make another one on all ranks"
            )

    def _state(self) -> dict[str, Any]:
        """The module's own mode and hooks."""
        return {key: value for key, value in vars(self).items() if key == "training" or key.endswith(_OF_HOOKS)}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, nn.Parameter)) and "_executor" in self.__dict__:
            raise TypeError(f"cannot add {name} to an OffloadModel: its layers are fixed when it is made")
        super().__setattr__(name, value)


def refuse_shallow_copy() -> NoReturn:
    """Raises TypeError for ``copy.copy`` of a model."""
    raise TypeError(
        "cannot copy an OffloadModel by copy.copy(): the copy would share parameters, whose homes belong to one model; "
        "use the model itself, or copy.deepcopy() for another one with homes of its own"
    )


def _rebuild(kind: Any, layers: Any, cuts: list[int], arguments: dict[str, Any], state: dict[str, Any]) -> Any:
    bare = nn.Sequential()
    bare._modules.update(layers)
    model = kind(bare, **{**arguments, "num_slices": len(cuts)}, _cuts=cuts)
    vars(model).update(state)  # of the container; each layer has its own
    return model
