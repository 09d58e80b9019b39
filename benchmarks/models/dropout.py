"""Dropout whose mask is a function of the row, so that any cut of a batch draws the same masks.

``nn.Dropout`` draws from one stream of random numbers in the order of the calls: a batch in 16 chunks draws other masks
than the batch in one piece. Here the mask is a function of (key of the row, layer, channel); all positions of a row
share it ("variational" dropout, Gal and Ghahramani 2016), so that hashing takes next to no time.
"""

import torch
from torch import Tensor, nn

_BITS = 53  # of the hash compared with the probability: what a float holds exactly


def _signed(value: int) -> int:
    """The 64 bits of ``value`` as torch's only 64-bit integer reads them."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own shift repeats the sign."""
    shifted: Tensor = (value >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def mix(value: Tensor) -> Tensor:
    """A bijection of 64 bits in which every bit of the result depends on every bit of ``value`` (splitmix64).

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014. Integer arithmetic wraps.
    """
    value = value + _GOLDEN
    value = (value ^ _shift_right(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def row_keys(seed: int, step: int, tower: int, rows: int) -> Tensor:
    """Keys of the rows of one batch, int64 of shape (rows,): others for each seed, step, tower and row."""
    key = torch.zeros(rows, dtype=torch.int64)
    for part in (torch.tensor(seed), torch.tensor(step), torch.tensor(tower), torch.arange(rows)):
        key = mix(key ^ part)
    return key


class RowDropout(nn.Module):
    """Zeroes channels of a row with ``probability`` and scales the others; the row's key decides which.

    Args:
        probability: of a channel to be zeroed, in [0, 1).
        layer: another number for each dropout of a model, or two layers would drop the same channels.
    """

    def __init__(self, probability: float, layer: int) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"expected a probability in [0, 1), got {probability=}")
        self.probability = probability
        self.layer = layer

    def forward(self, hidden: Tensor, keys: Tensor) -> Tensor:
        """``hidden`` of shape (rows, positions, channels), ``keys`` of shape (rows,)."""
        if not self.training or self.probability == 0:
            return hidden
        channels = torch.arange(hidden.size(-1), device=hidden.device)
        bits = mix(mix(keys + _signed(self.layer * _GOLDEN))[:, None] + channels)
        kept = _shift_right(bits, 64 - _BITS) >= int(self.probability * 2**_BITS)
        scale = kept.to(hidden.dtype) / (1 - self.probability)
        return hidden * scale[:, None, :]
