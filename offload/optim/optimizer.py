"""``OffloadOptimizer``: any ``torch.optim`` class for an ``OffloadModel``; shards are updated while others compute."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.forms.quantised import StoredTensor, is_taken_apart
from offload.heap import return_freed_memory
from offload.optim.disk_update import DiskParamBlock, group_slices
from offload.optim.elementwise import check_each_alone, check_updates_parts
from offload.optim.groups import (
    GroupChanges,
    Members,
    check_choices,
    check_closures,
    check_sparse,
    groups_of,
    members_of,
    options_of,
    placeholder,
)
from offload.optim.io_buffers import IOBufferPool
from offload.optim.param_block import OptimizerFactory, ParamBlock, UpdateJob
from offload.optim.state_forms import check_stored, form_of
from offload.optim.update import StepDecision, Update
from offload.optim.update_blocks import StoredStates, states_kept
from offload.storage import DeviceTier, Tier
from offload.storage.buffer import has_own_memory, on_own_storages
from offload.streaming.grad_norm import attached_norm, norms_of, total_norm
from offload.streaming.lane import CopyLane, ThreadCopyLane, threads_of_updates
from offload.streaming.optimizers import InBackward
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice, layout
from pipe.recompute.thread_state import restores_thread_state
from pipe.threads import Threads
from pipe.torch_private.tensors import storage_uses

if TYPE_CHECKING:
    from offload.model import OffloadModel

__all__ = ["OffloadOptimizer", "open_update_lane"]


def open_update_lane(device: torch.device) -> CopyLane:
    """The lane of updates: a thread, since homes are updated by the host. It ends with its last user."""
    return ThreadCopyLane("update", device, threads_of_updates(device))


class OffloadOptimizer(Optimizer):
    """Any ``torch.optim`` class for an :class:`~offload.OffloadModel`; states are stored beside the shards.

    ``step()`` makes the updates pending and returns. Each shard is updated just before its next load, in the order of
    loads, while the shards before it compute. The result is that of the plain optimizer after ``clip_grad_norm_``, for
    any training loop: every access through the model, the module that was wrapped, or any part of it (a forward,
    ``state_dict()``, ``parameters()``, an attribute, a copy, a checkpoint), to ``state``, or to the parameters of
    ``param_groups`` first finishes the pending updates. As long as other code holds a parameter, its gradient or a view
    of it (a list for an exponential average, a loop variable that still exists), ``step()`` updates at once, with no
    overlap; also for a class that changes its groups, such as one that counts steps there, or with all shards in
    memory. Edits of ``state`` and of the members of ``param_groups`` are followed by the next step.

    Args:
        model: whose parameters are trained.
        optimizer_class: a class of ``torch.optim``, or one that updates each parameter by itself as these do.
        params: None for all parameters; or parameters, ``(name, parameter)`` pairs or groups as ``torch.optim`` takes
            them.
        max_norm: clip gradients to this global 2-norm, with the coefficient of ``torch.nn.utils.clip_grad_norm_``. The
            norm is summed while gradients are offloaded; a write to a gradient through ``.data`` is not noticed.
        update_in_backward: update a shard as soon as its gradients are complete, in backward; they are never stored.
            For loops with one backward per step and without a ``GradScaler``. ``step()`` then only marks the end of
            the step.
        states: how states are stored between updates: None for their own type, ``torch.bfloat16``, or ``"8bit"``: codes
            of one byte with a float32 scale for 256 neighbours, as in 8-bit Adam (bitsandbytes, torchao); encoded are
            states with the shape and type of a contiguous floating-point matrix of at least 4,096 elements. Norms,
            biases, counts, and parameters that stay on a GPU keep theirs in full. ``state_dict()`` has
            what is stored: ``"exp_avg:8bit"`` (uint8) with ``"exp_avg:scales"``. A checkpoint may be loaded into any
            form. Results are those of the class with rounded states: measure your accuracy.
        optimizer_kwargs: of ``optimizer_class``.

    Raises:
        TypeError: if ``model`` or ``optimizer_class`` is of another type; or the class needs a closure, joins
            parameters in a step (a global norm), draws random numbers, or with ``states`` does not update each element
            by itself.
        ValueError: if hyperparameters are refused by the class, parameters are not the model's, or ``max_norm`` is
            combined with ``update_in_backward`` (the norm is known only after the last gradient), or that with the
            model's ``gradient_dtype``, or ``states="8bit"`` with a mesh; or if the model's ``memory`` is too small for
            the buffers of updates on disk.

    On disk a step of Adam with two slots transfers, for each float32 parameter: 8 bytes of weights read, by the load of
    each pass; 4 of its gradient and 8 of its two moments, each written once and read once; and 4 of weights written.
    The load of the forward and the update share one read. So 20 bytes are read and 16 written. With
    ``update_in_backward`` the gradient is not transferred, and the load of the backward and the update share one read:
    16 are read and 12 written. 8-bit states move 24.06 bytes in place of 36; a model with ``store_dtype="split"`` 34,
    with ``torch.bfloat16`` 30; one with ``gradient_dtype`` 4 less. A shard without gradients is not written.
    ``model.statistics()`` counts them.

    After an I/O error (a full or failing disk) nothing is lost and nothing is applied twice: repeat the call, or go on
    with the next batch; a ``step()`` that raised after its first update is applied once. After an error in the middle
    of ``torch``'s own arithmetic, or of a backward that updates, every call raises: make model and optimizer anew and
    load the last checkpoint.
    """

    #: Whether steps write parameters as homes store them.
    updates_homes = True
    #: ``GradScaler`` passes the scale instead of multiplying all stored gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: OffloadModel,
        optimizer_class: type[Optimizer],
        *,
        params: Any = None,
        max_norm: float | None = None,
        update_in_backward: bool = False,
        states: torch.dtype | str | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        _check_model(model, optimizer_class)
        rounded = any(shard.gradient_types.rounded for shard in model._homes.shards)
        check_choices(optimizer_class, max_norm, update_in_backward, rounded=rounded)
        self.max_norm = max_norm
        #: Number of steps. One that raised counts if it is sure to be applied.
        self.steps = 0
        #: A step whose call has raised although it is decided: repeating the call only ends it.
        self._raised: StepDecision | None = None
        #: Global norm of the gradients at the last step, before clipping; None without ``max_norm``.
        self.last_norm: Tensor | None = None
        self._model = model
        self.homes = homes = model._homes
        #: Those that live. The model refers to them weakly: what it does for an optimizer ends with it.
        self._optimizers = homes.streamer.gradient_offload.optimizers
        ours = dict.fromkeys(model.parameters())
        groups = groups_of([*ours] if params is None else params, ours)
        # The class checks its hyperparameters on empty tensors: some classes make states in their constructor.
        empty_groups = [{**group, "params": [placeholder(p) for p in group["params"]]} for group in groups]
        template = optimizer_class(empty_groups, **optimizer_kwargs)
        self._states_at_once = bool(template.state)
        for group, checked in zip(groups, template.param_groups, strict=True):
            group.update({**checked, "params": group["params"]})  # the caller's own dict and tensors, as in torch
            if not optimizer_class.__module__.startswith("torch.optim."):
                check_each_alone(optimizer_class, options_of(group), optimizer_kwargs)
        self._lane = open_update_lane(model.device)
        self.buffer_pool = IOBufferPool()
        kept = states_kept(optimizer_class, groups)
        self.stored = StoredStates.of(form_of(states), homes.shards, kept)
        #: Bytes of weights that are updated at a time, where they are in files.
        self.update_block_bytes = self.stored.update_block_bytes(homes.steps.spare_bytes())
        self.reserve_buffers()
        #: Reads weights into a slot while the update before still runs.
        self._filler = Threads(1, "offload-filler")
        self.factory = OptimizerFactory(optimizer_class, optimizer_kwargs, form_of(states))
        #: Of each shard, for the parameters of this optimizer.
        self.param_blocks: dict[Shard, list[ParamBlock]] = {shard: [] for shard in homes.shards}
        resident = [*homes.outside, *(() if homes.resident is None else [s.parameter for s in homes.resident.own])]
        #: Parameters that stay on the compute device; those that are taken apart are frozen.
        self._resident = [p for p in resident if not is_taken_apart(p)]
        #: Of them.
        self.resident_blocks: list[ParamBlock] = []
        #: Computes updates that run at once, on the stream of the caller: an interrupt cannot stop one half-way.
        self._thread_at_once = Threads(1, "offload-resident", operation_threads=threads_of_updates(model.device))
        self.in_backward = InBackward(self) if update_in_backward else None
        self._group_changes = GroupChanges(optimizer_class)
        #: Whether it is known that the class runs a closure before it updates.
        self._runs_closures = optimizer_class.__module__.startswith("torch.optim.")  # none of them is LBFGS
        #: The ids of the parameters of each group, and of what :attr:`state` shows of each parameter, by its id.
        self._members: list[list[int]] = []
        self._shown: dict[int, list[int]] = {}
        #: Of the class only: torch adds others to ``defaults`` when a state is loaded.
        self._class_defaults = dict(template.defaults)
        super().__init__(groups, dict(template.defaults))
        check_updates_parts(self, sharded=homes.public.sharded)
        self._optimizers.add(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in ``torch.optim``."""
        # parameters() finishes pending updates.
        (group,) = groups_of([param_group], {*self._model.parameters()})
        self._follow_edits()
        super().add_param_group(group)
        self._add_blocks(len(self.param_groups) - 1)
        self._members = self._members_now()
        if self._states_at_once:
            for param_block in self._all_param_blocks():
                param_block.prepare(self.options())
                self.publish(param_block)
                if param_block.shard.blocking_io:
                    return_freed_memory()  # states of a whole shard, which are in their file now

    def _add_blocks(self, index: int) -> None:
        """Makes the param blocks of a group."""
        group = self.param_groups[index]
        members = {*group["params"]}
        group["params"] = Members(group["params"], self._finish_updates)
        for shard in self.homes.shards:
            slices = [s for s in shard.own if self.homes.public.of(s) in members]
            tier = shard.tier or self.homes.tier
            self.param_blocks[shard] += self.make_param_blocks(shard, slices, index, tier)
        stored = {self.homes.public.stored(p) for p in members}
        if resident := [p for p in self._resident if p in stored]:
            slices, _ = layout(StoredTensor("", p) for p in resident)
            self.resident_blocks.append(ParamBlock(Shard(-1, 0, []), slices, index, self.factory))

    def _members_now(self) -> list[list[int]]:
        return [[*map(id, members_of(group))] for group in self.param_groups]

    def check_unedited(self) -> None:
        """See :meth:`.ModelOptimizer.check_unedited`: asked before a backward that is to update."""
        if self._is_edited():
            raise RuntimeError(
                "state, or members of param_groups, were edited, and this backward is to update; call "
                "optimizer.synchronize() after such an edit, which takes it over"
            )

    def _is_edited(self) -> bool:
        """Whether users changed the members of ``param_groups``, or what is in ``state``, while no update is pending.

        It calls nothing of Python for each parameter.
        """
        if self._members != self._members_now():
            return True
        members = itertools.chain.from_iterable(map(members_of, self.param_groups))
        states = map(vars(self)["state"].get, members, itertools.repeat(_NO_STATE))
        values = itertools.chain.from_iterable(map(dict.values, states))
        known = map(self._shown.get, itertools.chain.from_iterable(self._members), itertools.repeat(()))
        return [*map(id, values)] != [*itertools.chain.from_iterable(known)]

    def _follow_edits(self) -> None:
        """Takes over what users changed in ``param_groups`` and ``state``, which ``torch`` reads in a step.

        No update may be pending. Raises ValueError or RuntimeError before anything changes. After an OSError the next
        call goes on.
        """
        if not self._is_edited():
            return
        if self.in_backward is not None and self.in_backward.has_updated:
            raise RuntimeError(
                "state, or members of param_groups, were edited between a backward that updates and step(); edit them "
                "after step()"
            )
        members = [p for group in self.param_groups for p in group["params"]]
        if len({*members}) < len(members) or not {*members} <= {*self._model.parameters()}:
            raise ValueError("expected parameters of the model, each in one group, but param_groups was edited")
        self._members = []  # until all states are taken over
        self.param_blocks, self.resident_blocks = {shard: [] for shard in self.homes.shards}, []
        for index in range(len(self.param_groups)):
            self._add_blocks(index)
        for param_block in self._all_param_blocks():
            self.load_states(param_block, self.options())
        self._members = self._members_now()

    @restores_thread_state
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes the update of all parameters that have a gradient pending.

        Args:
            closure: called first, with gradients enabled, as by any first-order class: it computes the gradients.

        Returns:
            What the closure returned; None without one.

        Raises:
            TypeError: if the closure cannot be called.
            ValueError: for a closure, if the class does not call one exactly once, before it updates anything.
            RuntimeError: during a forward or backward; or if an earlier update cannot be finished.
        """
        loss = None
        if closure is not None:
            self._check_idle()
            if not callable(closure):
                raise TypeError(f"expected a function that computes gradients, or None, got closure={closure!r}")
            if not self._runs_closures:
                check_closures(self.factory.kind, self.factory.arguments, self.param_groups[0])
                self._runs_closures = True
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        self._check_idle()
        if self.in_backward is not None and self.in_backward.has_updated and hasattr(self, "grad_scale"):
            self.in_backward.fail(
                "a GradScaler scaled the loss, and update_in_backward=True has updated parameters with the scaled "
                "gradients already. Train in bfloat16, which needs no scaler, or pass update_in_backward=False; make "
                "model and optimizer anew and load the last checkpoint"
            )
        if self._raised is not None and self._raised.repeats(self._optimizers.backwards):
            self._end_step(self._raised, at_once=True)
            return
        self.homes.public.begin_step(self)
        self._synchronize()
        self._follow_edits()
        self._raised = None
        streamer = self.homes.streamer
        # Other code that holds parameters can read them without asking the model.
        at_once = streamer.updates_at_once or self.homes.public.held_elsewhere(self._optimizers.references(self))
        self.homes.assigned_data.store()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0:
            return  # GradScaler skips this step
        # Without a scale a GradScaler has unscaled in place, which does not increment the version of gradients.
        trusted = not (hasattr(self, "grad_scale") and scale is None)
        coefficient = self._coefficient(scale, trusted=trusted)
        written = self._group_changes.changes
        options = self.options() if self.in_backward is None else self.in_backward.options_of_step(written)
        in_order = sorted(self.param_blocks, key=lambda shard: shard.index)  # of calls, which may be noted later
        # Where nothing is loaded meanwhile; on a device with memory of its own as kernels on the stream of the caller.
        runs_there = streamer.updates_at_once or has_own_memory(self.homes.device)
        there = {shard for shard in in_order if runs_there and shard.on_device}
        updates = [self.update(shard, options, coefficient) for shard in in_order if shard not in there]
        decided = [update for update in updates if update is not None]
        resting = itertools.chain.from_iterable(self.param_blocks[shard] for shard in in_order if shard in there)
        at_once_jobs = self._jobs([*self.resident_blocks, *resting], options, coefficient)
        backwards = self._optimizers.backwards
        thread, meter = self._thread_at_once, self.homes.meter
        decision = StepDecision(decided, at_once_jobs, thread, self._finish_job, meter, options, backwards)
        if not self.steps:
            # Without this, free memory would stay beside the states that are made now, of which no plan knows yet.
            return_freed_memory()
        try:
            try:
                decision.run_at_once()
            except BaseException:
                self._thread_at_once.wait_idle()
                if decision.begun:
                    # A step is applied as a whole: updates that began are finished, the others follow.
                    self._decide(decision)
                raise
            self._decide(decision)
            decision.start()
            self._end_step(decision, at_once=at_once)
        except BaseException:
            members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            decision.gradients = [(p, weakref.ref(p.grad)) for p in members]
            raise

    def _decide(self, decision: StepDecision) -> None:
        """Makes all updates pending, even if an exception interrupts it: it is repeated before homes are used."""
        self._raised = decision  # until the call returns
        self.homes.public.note_step(self)
        streamer, number = self.homes.streamer, self.steps + 1

        def decide() -> None:
            decision.decide()
            self.steps = number
            if self.in_backward is not None:
                self.in_backward.close()
            streamer.finish_step = None

        streamer.finish_step = decide
        try:
            decide()
        except BaseException:
            decide()
            raise

    def _end_step(self, decision: StepDecision, *, at_once: bool) -> None:
        if at_once or self._group_changes.expected:
            self._synchronize()
        if self._group_changes.expected:
            self._step_groups_without_gradients(decision.options)
        self._raised = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients; a pending update keeps its own. ``set_to_none=False`` first finishes it."""
        if not set_to_none:
            self._synchronize()
            super().zero_grad(set_to_none=False)
        members = [p for group in self.param_groups for p in members_of(group)]
        for p in members if set_to_none else ():
            p.grad = None
        self.homes.public.take_gradients()
        self.homes.public.drop_sums(members)
        self._raised = None

    def synchronize(self) -> None:
        """Finishes the pending updates: afterwards parameters, gradients and states have their values of the last step.

        Takes over edits of ``state`` and of the members of ``param_groups``, as ``step()`` does. Weights that rest in
        memory are written to a home that is kept.

        Raises:
            OSError: if a home cannot be read or written. Call it again to resume.
            RuntimeError: if the class does not treat each parameter by itself.
        """
        self._synchronize()
        self._follow_edits()
        if self.homes.tier.keeps:
            self.homes.write_back()

    def _synchronize(self) -> None:
        self.homes.streamer.apply_pending_updates()
        self._group_changes.check()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside only accumulate gradients. Needed with ``update_in_backward`` only."""
        if self.in_backward is None:
            yield
            return
        self.in_backward.accumulating += 1
        try:
            yield
        finally:
            self.in_backward.accumulating -= 1

    def state_dict(self) -> dict[str, Any]:
        """The ``state_dict()`` of the plain optimizer. Its tensors are the stored states, not copies."""
        self._synchronize()
        saved = super().state_dict()
        views = on_own_storages(value for state in saved["state"].values() for value in state.values())
        # In the order of parameters, as in the plain optimizer; param blocks get their states in another order.
        in_order = sorted(saved["state"].items())
        saved["state"] = {k: {name: views.get(id(x), x) for name, x in state.items()} for k, state in in_order}
        if self._rounds_weights():
            saved["steps"] = self.steps  # decides how the next step is rounded; the plain class ignores it
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict()`` of this optimizer, or of the plain one; the tensors are copied."""
        self._check_idle()
        self._synchronize()
        self._follow_edits()
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = {p: state_dict["state"].get(n, {}) for n, p in zip(numbers, parameters, strict=False)}
        for parameter, state in states.items():
            check_stored(state, parameter)
        # Without the states, which torch would cast, also those that are stored in a form; it refuses other groups.
        super().load_state_dict({**state_dict, "state": {}})
        self._raised = None
        self.state.update(states)
        if self._rounds_weights():
            self.steps = state_dict.get("steps", self.steps)
        for group in self.param_groups:
            for key, value in self._class_defaults.items():  # missing in checkpoints of older releases of torch
                group.setdefault(key, value)
        for param_block in self._all_param_blocks():
            self.load_states(param_block, self.options())

    def _rounds_weights(self) -> bool:
        """Whether updates round stochastically."""
        return any(s.form is not None and not s.form.exact for shard in self.homes.shards for s in shard.formed)

    def _step_groups_without_gradients(self, options: list[dict[str, Any]]) -> None:
        """Steps groups without gradients on one param block: the plain class writes into these groups, too."""
        for index in range(len(self.param_groups)):
            param_block = next((p for p in self._all_param_blocks() if p.group == index), None)
            if index not in self._group_changes.changes and param_block is not None:
                param_block.prepare(options).step()
                self._group_changes.publish(self.param_groups[index], index, param_block.group_changes())
        self._group_changes.end_step()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("cannot copy or pickle an OffloadOptimizer, since it belongs to its model; use state_dict()")

    def _all_param_blocks(self) -> Iterator[ParamBlock]:
        return itertools.chain(itertools.chain.from_iterable(self.param_blocks.values()), self.resident_blocks)

    def options(self) -> list[dict[str, Any]]:
        """A copy of the hyperparameters of all groups."""
        return [options_of(group) for group in self.param_groups]

    @property
    def updated_shards(self) -> frozenset[int]:
        """The shards that hold parameters of this optimizer that take a gradient."""
        blocks = itertools.chain.from_iterable(self.param_blocks.values())
        return frozenset(b.shard.index for b in blocks if any(p.requires_grad for p in b.parameters))

    def _check_idle(self) -> None:
        if self.homes.busy:
            raise RuntimeError(
                "expected no running forward or backward, but a layer or a hook called the optimizer; call it later"
            )
        if self.in_backward is not None:
            self.in_backward.check()

    def _coefficient(self, scale: Tensor | None, *, trusted: bool) -> Tensor | None:
        """Factor of the gradients, None for 1: of ``clip_grad_norm_``, and of the ``scale`` of a ``GradScaler``.

        ``trusted``: whether the norms that came with the gradients are still theirs.
        """
        if self.max_norm is None:
            return None if scale is None else 1 / scale.to("cpu")
        public = self.homes.public
        stored = public.local(p for group in self.param_groups for p in group["params"])
        grads = [p.grad for p in stored if p.grad is not None]
        trusted &= not public.sharded  # a write to a DTensor does not increment the version of what it shows
        attached = [attached_norm(grad) if trusted else None for grad in grads]
        read = iter(norms_of([g for g, norm in zip(grads, attached, strict=True) if norm is None]))
        total = public.total_norm(total_norm([next(read) if norm is None else norm for norm in attached]))
        if scale is not None:
            total = total / scale.to(total)
        self.last_norm = total
        # As in torch.nn.utils.clip_grad_norm_.
        coefficient = torch.clamp(self.max_norm / (total + 1e-6), max=1.0)
        if scale is not None:
            coefficient = coefficient / scale.to(coefficient)
        # What is on a device is not waited for.
        return None if coefficient.device.type == "cpu" and float(coefficient) == 1 else coefficient

    def _jobs(
        self,
        param_blocks: Iterable[ParamBlock],
        options: list[dict[str, Any]],
        coefficient: Tensor | None,
        kept: Mapping[Slice, Tensor] = MappingProxyType({}),
    ) -> list[UpdateJob]:
        jobs = []
        for param_block in param_blocks:
            gradients = [kept.get(s, s.parameter.grad) if kept else s.parameter.grad for s in param_block.slices]
            if any(gradient is not None for gradient in gradients):
                jobs.append(job := UpdateJob(param_block, gradients, options, coefficient, self.steps + 1))
                if job.sparse:
                    param_block.check_dense(gradients)
                    check_sparse(self.factory.kind, self.factory.arguments, options[param_block.group])
        return jobs

    def update(
        self,
        shard: Shard,
        options: list[dict[str, Any]],
        coefficient: Tensor | None = None,
        kept: dict[Slice, Tensor] | None = None,
    ) -> Update | None:
        """The update of one shard from its stored gradients and the ``kept`` ones; None if it has no gradient."""
        tasks = self._jobs(self.param_blocks[shard], options, coefficient, kept or {})
        if not tasks:
            return None
        in_slot = shard.blocking_io and shard.slot_keeps_weights and not has_own_memory(self.homes.device)
        finished, letter = weakref.WeakMethod(self._finish_job), "U" if kept is None else "V"
        return Update(
            shard, tasks, self._lane, self.homes.meter, self._filler, self.buffer_pool, finished, in_slot, letter
        )

    def _finish_job(self, job: UpdateJob) -> None:
        self.publish(job.param_block)
        index = job.param_block.group
        if index < len(self.param_groups):  # users may remove it meanwhile
            self._group_changes.publish(self.param_groups[index], index, job.group_changes, job.options)

    # --- where states are stored --------------------------------------------------------------------------------------

    def _finish_updates(self) -> None:
        if not self.homes.busy:
            self._synchronize()

    @property
    def state(self) -> Any:
        """Of each parameter, as in ``torch.optim``: after the pending updates, which an access finishes."""
        self._finish_updates()
        return vars(self)["state"]

    @state.setter
    def state(self, states: Any) -> None:
        vars(self)["state"] = states

    def publish(self, param_block: ParamBlock) -> None:
        """Shows the states of a param block in :attr:`state`."""
        public = self.homes.public
        for s, state in zip(param_block.slices, param_block.states(), strict=True):
            if state:
                parameter = public.of(s)
                vars(self)["state"][parameter] = shown = public.show_state(s, state)
                self._shown[id(parameter)] = [*map(id, shown.values())]

    def load_states(self, param_block: ParamBlock, options: list[dict[str, Any]]) -> None:
        """Takes the states of a param block from :attr:`state`, where they were loaded, and shows them there again."""
        public = self.homes.public
        states = vars(self)["state"]
        shown = [(s, public.of(s)) for s in param_block.slices]
        param_block.load_states([public.stored_state(s, states.get(p, {})) for s, p in shown], options)
        for _, p in shown:
            states.pop(p, None)
            self._shown.pop(id(p), None)
        self.publish(param_block)

    def make_param_blocks(self, shard: Shard, slices: Sequence[Slice], group: int, tier: Tier) -> list[ParamBlock]:
        """New param blocks of parameters of one shard and one group, whose states are stored in ``tier``."""
        device = tier.device if isinstance(tier, DeviceTier) else torch.device("cpu")
        if not tier.blocking_io:
            return [ParamBlock(shard, slices, group, self.factory, device)] if slices else []
        files: dict[str, Any] = {"tier": tier, "buffer_pool": self.buffer_pool, "max_bytes": self.update_block_bytes}
        parts = group_slices(slices, self.update_block_bytes)
        return [DiskParamBlock(shard, part, group, self.factory, device, **files) for part in parts]

    def reserve_buffers(self) -> None:
        """Frees the buffers of updates in files if no shard needs them."""
        if not any(shard.blocking_io for shard in self.homes.shards):
            self.buffer_pool.free_memory()

    def buffer_bytes(self, spare_bytes: float | None = None) -> int:
        """Bytes of the buffers of updates in files; 0 for homes in memory.

        Those that are reserved, or more if updates have needed more. An update whose gradient is still in memory needs
        fewer, but which one it is depends on how fast the files are. ``spare_bytes``: those that would be reserved if
        so many were left for them.
        """
        if not self.homes.tier.blocking_io:
            return 0
        if spare_bytes is not None:
            return self.stored.buffer_bytes(self.stored.update_block_bytes(spare_bytes))
        return max(self.buffer_pool.nbytes, self.stored.buffer_bytes(self.update_block_bytes))

    def state_bytes(self, shard: Shard) -> int:
        """Bytes of the states of a shard; 0 before its first update."""
        return _state_bytes(self.param_blocks.get(shard, ()))

    def resident_state_bytes(self) -> int:
        """Bytes of the states of parameters that stay on the compute device; 0 before their first update."""
        return _state_bytes(self.resident_blocks)

    def states_in_use(self, shard: Shard) -> bool:
        """Whether other code has views of the states of a shard, besides the tensors themselves."""
        stored = 1 if shard.blocking_io else 0  # the block itself
        blocks = self.param_blocks.get(shard, ())
        own = [value for block in blocks for value in block.state_tensors() if not value.is_sparse]
        ours = Counter(value.untyped_storage().data_ptr() for value in own)
        return any(storage_uses(x) > ours[x.untyped_storage().data_ptr()] + stored for x in own if x.dim())

    def prepare_move(self, shard: Shard, tier: Tier) -> tuple[list[tuple[Tensor, Tensor]], Callable[[], None]]:
        """Copies the states of a shard to ``tier``.

        Returns the tensors that move, each with its new memory; and what ends the move after they got it (idempotent).
        Between devices states are copied, as by ``load_state_dict()``: which of them are on which device is the class's
        to decide.
        """
        self._follow_edits()
        crosses = isinstance(tier, DeviceTier) or isinstance(shard.tier, DeviceTier)
        old, options = self.param_blocks.get(shard, []), self.options()
        new: list[ParamBlock] = []
        moved: list[tuple[Tensor, Tensor]] = []
        if not (tier.blocking_io or crosses):
            moved += [pair for block in old for pair in block.states_in_memory()]
        for group in dict.fromkeys(block.group for block in old):
            members = [block for block in old if block.group == group]
            made = any(member.optimizer is not None for member in members)
            states = {s: state for block in members for s, state in zip(block.slices, block.states(), strict=True)}
            for block in self.make_param_blocks(shard, [s for s in shard.own if s in states], group, tier):
                mine = [states[s] for s in block.slices]
                if made and crosses:
                    block.load_states(mine, options)
                elif made:
                    moved += block.adopt_states(mine, options)
                new.append(block)

        def commit() -> None:
            if shard in self.param_blocks:
                self.param_blocks[shard] = new
            for block in new:
                self.publish(block)

        return moved, commit


#: What ``state`` shows of a parameter before its first update.
_NO_STATE: dict[str, Any] = {}


def _state_bytes(param_blocks: Iterable[ParamBlock]) -> int:
    return sum(x.numel() * x.element_size() for block in param_blocks for x in block.state_tensors())


def _check_model(model: Any, kind: Any) -> None:
    if not hasattr(type(model), "memory_report"):
        raise TypeError(f"expected an OffloadModel, got {type(model).__name__} (model); use torch's class itself")
    if isinstance(kind, type) and issubclass(kind, OffloadOptimizer):
        raise TypeError(f"expected a class such as torch.optim.AdamW, got optimizer_class={kind!r}")
