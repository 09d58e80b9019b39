"""Measures how much slower layers compute while copies and updates run on the same cores.

A cell that takes ``seconds`` while lanes are busy for ``overlap`` seconds in all is modelled as ``alone + share *
overlap``. The share is that of least squares over the latest cells, whose mean is subtracted in groups of cells that do
the same work: in some of them lanes are busy longer than in others. Without enough difference :data:`PRIOR` is used.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable

__all__ = ["PRIOR", "Contention"]

#: Seconds that a cell loses to one second of a lane, before it is measured.
PRIOR = 0.25
#: Cells that are remembered, and the least number for a fit.
LATEST, LEAST = 512, 24
#: Least standard deviation of the overlap, as a share of the mean duration of a cell.
LEAST_SPREAD = 0.05


class Contention:
    """Overlaps of cells with lanes, and the share of them that cells lose."""

    def __init__(self) -> None:
        # By thread, so that no lock is needed: an interrupt inside of one would leave it locked.
        self._begun: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        #: (group, rows, seconds, overlap) of the latest cells.
        self._cells: deque[tuple[Hashable, float, float, float]] = deque(maxlen=LATEST)
        #: Rows and overlap of each group among these; empty after another cell.
        self._sums: dict[Hashable, tuple[float, float]] = {}

    def lane_begins(self) -> None:
        """A lane begins to copy or to update, in this thread."""
        self._begun[threading.get_ident()] = time.perf_counter()

    def lane_ends(self) -> None:
        """A lane ends to do so."""
        this = threading.get_ident()
        begun = self._begun.pop(this, None)
        if begun is not None:
            self._ended[this] = self._ended.get(this, 0.0) + time.perf_counter() - begun

    def busy_seconds(self) -> float:
        """Seconds in which lanes were busy so far, summed over lanes."""
        now = time.perf_counter()
        return sum([*self._ended.values()]) + sum([now - begun for begun in [*self._begun.values()]])

    def add_cell(self, group: Hashable, rows: float, seconds: float, overlap: float) -> None:
        """Records a cell; ``group``: of cells that do the same work for each row."""
        if rows:
            self._cells.append((group, rows, seconds, overlap))
            self._sums = {}

    def forget_cells(self) -> None:
        """Forgets the cells so far, whose groups mean others from now on."""
        self._cells.clear()

    def share(self) -> float:
        """Seconds that a cell loses to one second of a busy lane, from 0 to 1."""
        groups: dict[Hashable, list[tuple[float, float]]] = {}
        for group, rows, seconds, overlap in self._cells:
            groups.setdefault((group, rows), []).append((seconds, overlap))
        both = square = total = 0.0
        count = 0
        for samples in groups.values():
            mean, middle = (sum(column) / len(samples) for column in zip(*samples, strict=True))
            both += sum((seconds - mean) * (overlap - middle) for seconds, overlap in samples)
            square += sum((overlap - middle) ** 2 for _, overlap in samples)
            total += sum(seconds for seconds, _ in samples)
            count += len(samples)
        if count < LEAST or (square / count) ** 0.5 < LEAST_SPREAD * total / count:
            return PRIOR
        return min(1.0, max(0.0, both / square))

    def mean_overlap(self, group: Hashable) -> float:
        """Mean seconds of busy lanes for each row of a cell of this group; 0 if none was recorded."""
        if not self._sums:
            sums: dict[Hashable, tuple[float, float]] = {}
            for other, rows, _, overlap in self._cells:
                rows_before, overlap_before = sums.get(other, (0, 0.0))
                sums[other] = rows_before + rows, overlap_before + overlap
            self._sums = sums
        rows, overlap = self._sums.get(group, (1, 0.0))
        return overlap / rows
