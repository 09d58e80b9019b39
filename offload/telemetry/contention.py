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

#: Seconds that a cell loses to one second of a lane, before it is measured. An operation is dealt in equal parts to the
#: threads of all cores and ends with the last of them, the one that shares its core with the lane at half its speed.
PRIOR = 0.5
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
        #: (group, rows, seconds, overlap, whether its step was disturbed) of the latest cells.
        self._cells: deque[tuple[Hashable, float, float, float, bool]] = deque(maxlen=LATEST)
        #: Rows and overlap of each group among these, by whether its step was disturbed; empty after another cell.
        self._sums: dict[tuple[Hashable, bool], tuple[float, float]] = {}

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

    def add_cell(
        self, group: Hashable, rows: float, seconds: float, overlap: float, *, disturbed: bool = False
    ) -> None:
        """Records a cell; ``group``: of those that do the same work for a row; ``disturbed``: see :class:`.Clock`."""
        if rows:
            self._cells.append((group, rows, seconds, overlap, disturbed))
            self._sums = {}

    def share(self) -> float:
        """Seconds that a cell loses to one second of a busy lane, from 0 to 1."""
        groups: dict[Hashable, list[tuple[float, float]]] = {}
        for group, rows, seconds, overlap, _ in self._cells:
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
        """Mean seconds of busy lanes for each row of a cell of this group; 0 if none was recorded.

        Of the cells whose seconds a :class:`.Clock` uses: disturbed steps count only where there are no others.
        """
        if not self._sums:
            sums: dict[tuple[Hashable, bool], tuple[float, float]] = {}
            for other, rows, _, overlap, disturbed in self._cells:
                rows_before, overlap_before = sums.get((other, disturbed), (0, 0.0))
                sums[other, disturbed] = rows_before + rows, overlap_before + overlap
            self._sums = sums
        rows, overlap = self._sums.get((group, False)) or self._sums.get((group, True), (1, 0.0))
        return overlap / rows
