"""Updates parameters on the compute device, outside of the blocks or of shards that rest there: at once, in ``step()``.

A thread computes the updates, on the stream of the caller. So an interrupt of the caller cannot stop one half-way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.optim.param_block import HostParamBlock, OptimizerFactory, ParamBlock, UpdateJob
from offload.optim.update import note_update
from offload.streaming.quantised import StoredTensor, is_taken_apart
from offload.streaming.shard import Shard
from offload.streaming.slices import layout
from pipe.stream import current_stream, use_device, use_stream
from pipe.threads import Threads

__all__ = ["ResidentParamBlock", "ResidentParameters"]


class ResidentParamBlock(HostParamBlock):
    """Parameters that are updated where they are; users may replace their memory between updates."""

    #: Whether proxies have the parameters' memory.
    _bound = False

    def __init__(self, parameters: Iterable[nn.Parameter], group: int, factory: OptimizerFactory) -> None:
        slices, _ = layout(StoredTensor("", p) for p in parameters)
        super().__init__(Shard(-1, 0, []), (), group, factory)
        self.slices = slices
        self.proxies = [s.parameter.detach() for s in slices]
        if (form := factory.form) is not None:
            # States are encoded on the host.
            self.encoded = {k for k, p in enumerate(self.proxies) if p.device.type == "cpu" and form.encodes(p)}
        self._release()

    @contextlib.contextmanager
    def _values(self) -> Iterator[None]:
        """A context in which proxies have the parameters' memory."""
        if self._bound:
            yield
            return
        try:
            self._bound = True
            for proxy, parameter in zip(self.proxies, self.parameters, strict=True):
                proxy.data = parameter.data
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """Frees gradients and values of proxies, which keep their shapes and types."""
        for proxy in self.proxies:
            proxy.grad = None
            proxy.data = torch.empty((), dtype=proxy.dtype, device=proxy.device).expand(proxy.shape)
        self._bound = False

    def prepare(self, options: Sequence[Mapping[str, Any]], *, sparse: bool = False) -> Optimizer:
        """See :meth:`ParamBlock.prepare`."""
        with self._values():
            return super().prepare(options, sparse=sparse)

    def load_states(self, states: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`ParamBlock.load_states`."""
        with self._values():
            super().load_states(states, options)

    def run(self, job: UpdateJob, slot: Tensor | None, upcoming: Callable[[], Iterable[UpdateJob]] = tuple) -> None:
        """Updates the parameters."""
        with self._values():
            super().run(job, slot, upcoming)


class ResidentParameters:
    """The ``parameters`` of a model that an optimizer updates at once, with so many ``operation_threads``."""

    def __init__(
        self, parameters: Collection[nn.Parameter], factory: OptimizerFactory, operation_threads: int | None
    ) -> None:
        self._parameters = parameters
        self._factory = factory
        self._thread = Threads(1, "offload-resident", operation_threads=operation_threads)
        self.blocks: list[ParamBlock] = []

    def add_group(self, members: Collection[nn.Parameter], group: int) -> None:
        """Adds those of a group of the user's optimizer."""
        mine = [p for p in self._parameters if p in members and not is_taken_apart(p)]  # those are frozen
        if mine:
            self.blocks.append(ResidentParamBlock(mine, group, self._factory))

    def run(self, jobs: Sequence[UpdateJob], finished: Callable[[UpdateJob], None]) -> None:
        """Runs the updates that are not done. After an interrupt :meth:`wait_idle` has to be called before."""
        left = [job for job in jobs if not job.done]
        if not left:
            return
        device = left[0].param_block.parameters[0].device
        stream = current_stream(device)

        def work() -> None:
            with use_device(device), use_stream(stream), torch.no_grad():
                for job in left:
                    job.param_block.run(job, None)
                    note_update(job)  # a backward that saved the old values notices the new ones
                    job.done = True
                    finished(job)

        try:
            future = self._thread.submit(work)
        except RuntimeError:  # in a forked process, or at exit, there is no thread
            work()
            return
        future.wait()

    def wait_idle(self) -> None:
        """Waits until no update is running."""
        self._thread.wait_idle()
