"""The least work of a step, counted from shapes: what limits of a step are computed from."""


def block_flops(dim: int, tokens: int, positions: int) -> float:
    """Floating point operations of one transformer block's forward; a backward takes twice as many.

    Four square matrices of attention and eight of the perceptron see every token; scores and what they select are two
    products over the ``positions`` tokens of its row. A multiply-add counts two.
    """
    return float(tokens) * (24 * dim**2 + 4 * positions * dim)


def gradient_bytes(parameters: float) -> float:
    """Bytes copied at the least by a forward and a backward: each fp32 parameter is read, its gradient is written."""
    return 4.0 * parameters


def adamw_bytes(parameters: float) -> float:
    """Bytes copied at the least by AdamW in float32, where a copied byte is one read and one written.

    A parameter, its gradient and both moments are read: 16 bytes. All but the gradient are written: 12.
    """
    return 14.0 * parameters
