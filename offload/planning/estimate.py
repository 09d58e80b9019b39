"""What a training step is predicted to cost before it runs: seconds and bytes of its plan."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.shown import shown_record

__all__ = ["Estimate"]


@dataclass(frozen=True)
class Estimate:
    """Prediction for one step, forward and backward; ``print()`` shows it as a table."""

    #: Seconds from the first load to the last gradient at home, without the user's loss; with the updates of an
    #: ``OffloadOptimizer``, without any other optimizer.
    seconds: float
    #: Of these, seconds in which compute waits for a copy.
    wait_seconds: float
    #: Seconds inside layers.
    compute_seconds: float
    #: Bytes that the step reads from homes, and bytes of gradients that it writes there.
    bytes_loaded: int
    bytes_stored: int
    #: The most bytes in each place: on the compute device (what the engine holds; the activations inside one cell come
    #: on top), at home (parameters, gradients, boundaries that are written out), and in host memory between the two
    #: ("staging"), which includes the buffers of optimizers. Where shards rest in host memory although their homes are
    #: files: these, with their gradients and optimizer states ("memory").
    peak_bytes: dict[str, int]
    #: On the compute device on top of that: what layers save for their backward, of one cell where it is recomputed,
    #: of all cells where it is not; and the gradients of activations that one cell computes from it.
    activation_bytes: int
    #: The most bytes at one time in the memory that layers compute in, all of the above together; where that is host
    #: memory, homes in host memory with their optimizer states included. Less than the sum of the above, whose peaks
    #: come at different times.
    memory_bytes: int

    def __str__(self) -> str:
        return shown_record(self)
