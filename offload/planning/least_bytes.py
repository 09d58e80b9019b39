"""The least bytes that a training step moves between memory and storage, whatever the order of its work.

A byte that is needed and not in memory is read, and a new value that leaves memory is written. Two moments separate the
work of a step, whatever else is ordered how:

::

    update, forward  | end of forward |  backward  | end of backward |  update, forward of the next step
                      all layers have             with clipping, no layer is updated before: only
                      run before the              now the norm of all gradients is known
                      loss is known

So what a step moves follows from what is in memory at these two moments:

==============  =========================================  ==================================================
                moved if it is in memory at neither        less if it is there
==============  =========================================  ==================================================
weights         read twice, written once                   at one of them 1, at both 3
frozen weights  read twice                                 at one of them 1, at both 2
states          read and written once                      at both 2
gradients       written and read; without clipping none,   at the end of backward 2
                since the layer is updated at once
==============  =========================================  ==================================================

The best use of so much memory at each moment is a linear program. Its dual has a price of a byte at each moment: any
two prices give a bound, and the least bound is the answer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

__all__ = ["StoredBytes"]

#: Where the pieces of the dual meet.
_PRICES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)


@dataclass(frozen=True)
class StoredBytes:
    """What a model stores between uses, in bytes.

    ``weights`` take a gradient, ``frozen`` ones do not; ``gradients`` and ``states`` as they are stored.
    """

    weights: float
    gradients: float
    states: float
    frozen: float = 0.0

    def moved(self, *, clips: bool) -> float:
        """Bytes that a step reads and writes if it keeps nothing in memory; ``clips``: by the norm of all gradients."""
        return 3 * self.weights + 2 * self.frozen + 2 * self.states + 2 * self.gradients * clips

    def least(self, memory: float, *, clips: bool) -> float:
        """The fewest bytes that a step reads and writes if it keeps at most ``memory`` bytes.

        A bound: a step also holds activations and buffers, and whole layers at a time.
        """

        def saved(forward: float, backward: float) -> float:
            """The most that the memory can save, at these prices of a byte at the end of forward and of backward."""
            once, both = max(1 - forward, 1 - backward), forward + backward
            gains = (
                (self.weights, max(once, 3 - both)),
                (self.frozen, max(once, 2 - both)),
                (self.states, 2 - both),
                (self.gradients * clips, 2 - backward),
            )
            return memory * both + sum(nbytes * max(0.0, gain) for nbytes, gain in gains)

        return self.moved(clips=clips) - min(itertools.starmap(saved, itertools.product(_PRICES, repeat=2)))
