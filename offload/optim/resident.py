"""Updates parameters on the compute device, outside of the blocks or of shards that rest there: at once, in ``step()``.

A thread computes the updates, on the stream of the caller. So an interrupt of the caller cannot stop one half-way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from offload.optim.param_block import HostParamBlock, OptimizerFactory, ParamBlock, UpdateJob
from offload.optim.update import note_update
from offload.streaming.quantised import StoredTensor, is_taken_apart
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice, layout
from pipe.stream import current_stream, use_device, use_stream
from pipe.threads import Threads

__all__ = ["ResidentParamBlock", "ResidentParameters"]


class ResidentParamBlock(HostParamBlock):
    """Parameters that are updated where they are; users may replace their memory between updates."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: int, factory: OptimizerFactory) -> None:
        slices, _ = layout(StoredTensor("", p) for p in parameters)
        super().__init__(Shard(-1, 0, []), slices, group, factory)

    def at_rest(self, s: Slice) -> Tensor:
        """See :meth:`ParamBlock.at_rest`."""
        return s.parameter.data


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
