"""GradCache for JAX: gradient caching as functions over pytrees, for ``jit``, ``pmap`` and any optimizer.

::

    chunks = tree_chunk(batch, n)                                    (rows, ...)  ->  (n, rows / n, ...)
    reps = chunk_encode(partial(encode, params))(**chunks)           pass 1, one chunk alive at a time
    loss, cache = value_and_grad(unchunk_args(0, (0,))(loss_fn))(reps)
    grads = cache_grad(encode)(params, zeros, cache, **chunks)       pass 2, one chunk's activations alive at a time

Invariant: ``grads`` is ``jax.grad`` of the whole batch's loss. Randomness is an argument in JAX, so a key per chunk
that is passed along with the chunks (``dropout_rng=jax.random.split(key, n)``) is used again in pass 2.

Needs the extra ``jax``. Names and signatures are those of the JAX part of the package ``GradCache``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

try:
    import jax
    from jax import numpy as jnp
except ModuleNotFoundError as error:  # pragma: no cover - depends on what is installed
    raise ModuleNotFoundError("gradcache.jax needs JAX; install the extra: pip install gradstream[jax]") from error

__all__ = [
    "cache_grad",
    "cache_train_step",
    "chunk_encode",
    "grad_cached",
    "tree_chunk",
    "tree_unchunk",
    "unchunk_args",
]

Tree = Any


def tree_chunk(tree: Tree, n_chunk: int, axis: int = 0) -> Tree:
    """Splits ``axis`` of every array into equal chunks: (..., rows, ...) -> (..., n_chunk, rows / n_chunk, ...).

    Raises:
        ValueError: if an array's rows cannot be split evenly; XLA needs equal shapes, so pad the batch first.
    """

    def chunk(array: Any) -> Any:
        rows = array.shape[axis]
        if n_chunk < 1 or rows % n_chunk:
            raise ValueError(
                f"expected rows that {n_chunk} chunks divide, got {rows} (shape {array.shape}, axis={axis}); pad the "
                f"batch, or choose another n_chunk"
            )
        return array.reshape(*array.shape[:axis], n_chunk, rows // n_chunk, *array.shape[axis + 1 :])

    return jax.tree_util.tree_map(chunk, tree)


def tree_unchunk(tree: Tree, axis: int = 0) -> Tree:
    """The inverse of :func:`tree_chunk`."""

    def unchunk(array: Any) -> Any:
        return array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])

    return jax.tree_util.tree_map(unchunk, tree)


def chunk_encode(encode_fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Turns an encoder of one chunk into an encoder of chunked keyword arguments, one chunk after the other.

    Args:
        encode_fn: takes keyword arguments (pytrees of arrays), returns representations.

    Returns:
        A function of the same keyword arguments with a leading dimension of chunks; so are its representations.
    """

    @wraps(encode_fn)
    def encode_chunks(**chunks: Tree) -> Tree:
        def step(_: None, chunk: dict[str, Tree]) -> tuple[None, Tree]:
            return None, encode_fn(**chunk)

        return jax.lax.scan(step, None, chunks)[1]

    return encode_chunks


def cache_grad(encode_fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Turns an encoder into the second pass over it.

    Args:
        encode_fn: ``encode_fn(params=..., **chunk)`` returns the representations of a chunk.

    Returns:
        ``f(params, grad_accumulator, cached_grad, **chunks)`` adds, chunk by chunk, the gradient with respect to
        ``params`` to ``grad_accumulator``; ``cached_grad`` is the loss's gradient of the chunked representations. Types
        narrower than 32 bits are summed in 32 bits and rounded once.
    """

    @wraps(encode_fn)
    def second_pass(params: Tree, grad_accumulator: Tree, cached_grad: Tree, **chunks: Tree) -> Tree:
        def step(total: Tree, chunk: tuple[Tree, dict[str, Tree]]) -> tuple[Tree, None]:
            gradient, arguments = chunk
            _, pull = jax.vjp(lambda weights: encode_fn(params=weights, **arguments), params)
            return jax.tree_util.tree_map(_add, total, pull(gradient)[0]), None

        wide = jax.tree_util.tree_map(_widened, grad_accumulator)
        total, _ = jax.lax.scan(step, wide, (cached_grad, chunks))
        return jax.tree_util.tree_map(lambda now, before: now.astype(before.dtype), total, grad_accumulator)

    return second_pass


def _widened(array: Any) -> Any:
    array = jnp.asarray(array)
    narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    return array.astype(jnp.float32) if narrow else array


def _add(total: Any, gradient: Any) -> Any:
    # Integer parameters have no gradient; JAX marks this with the zero-byte type float0.
    return total if gradient.dtype == jax.dtypes.float0 else total + gradient.astype(total.dtype)


def unchunk_args(axis: int, argnums: Iterable[int] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a loss of whole batches so that it takes chunked representations in the positions ``argnums``.

    Differentiate the decorated function: gradients are then chunked too, as :func:`cache_grad` expects them.
    """
    positions = tuple(argnums)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def unchunked(*args: Any, **kwargs: Any) -> Any:
            whole = [tree_unchunk(arg, axis) if k in positions else arg for k, arg in enumerate(args)]
            return function(*whole, **kwargs)

        return unchunked

    return decorate


def grad_cached(encode_fn: Callable[..., Tree], policy: Callable[..., bool] | None = None) -> Callable[..., Tree]:
    """Gradient caching as one decorator: an encoder of chunks that keeps only representations for the backward.

    XLA recomputes the rest in backward, chunk by chunk, so ``jax.grad`` of a loss over its result is the two-pass
    step::

        encode_all = grad_cached(encode)                                encode(params, batch) of one chunk
        reps = encode_all(params, tree_chunk(batch, n))                 (rows, width), as of the whole batch

    Args:
        encode_fn: ``encode_fn(params, ...)`` returns the representations of a chunk.
        policy: values that may be saved in addition, see ``jax.checkpoint_policies``; by default none.

    Returns:
        A function of ``params`` and of chunked arguments, positional or by keyword: all but the first positional one
        have a leading dimension of chunks, see :func:`tree_chunk`. The representations have none: they are those of the
        whole batch, for a loss that compares every row with every other. A function whose parameters are bound already
        (``partial(encode, params)``) is called by keywords alone.
    """
    policy = jax.checkpoint_policies.nothing_saveable if policy is None else policy

    @wraps(encode_fn)
    def encode_all(*params_and_chunks: Tree, **chunks: Tree) -> Tree:
        params, positional = params_and_chunks[:1], params_and_chunks[1:]
        if not jax.tree_util.tree_leaves((positional, chunks)):
            raise TypeError(
                "expected params and chunked arguments, got no chunks; call it as (params, batch), with the batch "
                "split by tree_chunk"
            )

        def step(_: None, chunk: tuple[tuple[Tree, ...], dict[str, Tree]]) -> tuple[None, Tree]:
            return None, encode_fn(*params, *chunk[0], **chunk[1])

        # The scan keeps each chunk's inputs; its intermediate values are recomputed in backward.
        return tree_unchunk(jax.lax.scan(jax.checkpoint(step, policy=policy), None, (positional, chunks))[1])

    return encode_all


def cache_train_step(loss_fn: Callable[..., Any], state: Any, ss: Tree, tt: Tree, axis: str | None = "device") -> Any:
    """One step of a tied encoder over two sides of chunked inputs.

    Args:
        loss_fn: ``loss_fn(x, y, axis=axis)`` on whole batches of representations; its mean is the loss. Without an
            ``axis`` it is called as ``loss_fn(x, y)``.
        state: has ``params``, ``apply_fn(params=..., **chunk)`` and ``apply_gradients(grads=...)``, like a TrainState.
        ss: keyword arguments of ``apply_fn`` for the first side, with a leading dimension of chunks, see
            :func:`tree_chunk`.
        tt: the same for the second side.
        axis: name of the axis of ``pmap`` that loss and gradients are averaged over; None: a single device.

    Returns:
        The loss and the new state.
    """

    def encode(params: Tree, **chunk: Tree) -> Tree:
        return state.apply_fn(params=params, **chunk)

    @unchunk_args(axis=0, argnums=(0, 1))
    def loss_of(xx: Tree, yy: Tree) -> Any:
        return jnp.mean(loss_fn(xx, yy) if axis is None else loss_fn(xx, yy, axis=axis))

    encoder = chunk_encode(partial(encode, state.params))
    loss, (s_cache, t_cache) = jax.value_and_grad(loss_of, argnums=(0, 1))(encoder(**ss), encoder(**tt))
    grads = jax.tree_util.tree_map(jnp.zeros_like, state.params)
    grads = cache_grad(encode)(state.params, grads, s_cache, **ss)
    grads = cache_grad(encode)(state.params, grads, t_cache, **tt)
    if axis is not None:
        loss, grads = jax.lax.pmean((loss, grads), axis)
    return loss, state.apply_gradients(grads=grads)
