"""The JAX functions against plain ``jax.grad`` of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="needs the extra jax")

from jax import numpy as jnp  # noqa: E402

from gradcache.jax import (  # noqa: E402
    cache_grad,
    cache_train_step,
    grad_cached,
    tree_chunk,
    tree_unchunk,
)


def parameters(dtype: Any = jnp.float32) -> dict[str, Any]:
    a, b = jax.random.split(jax.random.key(0))
    return {"w": jax.random.normal(a, (8, 16), dtype), "v": jax.random.normal(b, (16, 6), dtype)}


def batch(rows: int, seed: int) -> dict[str, Any]:
    return {"x": jax.random.normal(jax.random.key(seed), (rows, 8))}


def encode(params: Any, x: Any, rng: Any = None) -> Any:
    hidden = jnp.tanh(x @ params["w"])
    if rng is not None:
        hidden = hidden * jax.random.bernoulli(rng, 0.5, hidden.shape)
    return hidden @ params["v"]


def contrastive(x: Any, y: Any, axis: str | None = None) -> Any:
    if axis is not None:
        y = jax.lax.all_gather(y, axis).reshape(-1, y.shape[-1])
    offset = 0 if axis is None else jax.lax.axis_index(axis) * x.shape[0]
    scores = jax.nn.log_softmax(x @ y.T)
    return -scores[jnp.arange(x.shape[0]), jnp.arange(x.shape[0]) + offset]


def whole_batch(params: Any, ss: Any, tt: Any) -> Any:
    return jax.value_and_grad(lambda p: contrastive(encode(p, **ss), encode(p, **tt)).mean())(params)


def assert_same(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    for x, y in zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert jnp.allclose(x, y, atol=tolerance, rtol=tolerance)


@dataclass
class State:
    """What the step needs of flax's TrainState; a plain gradient descent."""

    params: Any

    @staticmethod
    def apply_fn(params: Any, **chunk: Any) -> Any:
        return encode(params, **chunk)

    def apply_gradients(self, grads: Any) -> State:
        return replace(self, params=jax.tree_util.tree_map(lambda p, g: p - g, self.params, grads))


def parameters_after_step(params: Any, ss: Any, tt: Any, **options: Any) -> tuple[Any, Any]:
    loss, state = cache_train_step(contrastive, State(params), ss, tt, **options)
    return loss, state.params


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_step_equals_plain_gradient_of_the_whole_batch(chunks: int, compiled: bool) -> None:
    params, ss, tt = parameters(), batch(8, 1), batch(8, 2)
    loss, grads = whole_batch(params, ss, tt)
    step = partial(parameters_after_step, axis=None)
    if compiled:
        step = jax.jit(step)
    actual, new = step(params, tree_chunk(ss, chunks), tree_chunk(tt, chunks))
    assert_same(actual, loss)
    assert_same(new, jax.tree_util.tree_map(lambda p, g: p - g, params, grads))


def test_step_averages_over_the_devices_of_a_named_axis() -> None:
    """The axis is one of vmap, which behaves as pmap's does and needs no devices."""
    params, ss, tt = parameters(), batch(8, 1), batch(8, 2)
    loss, grads = whole_batch(params, ss, tt)
    on_devices = [tree_chunk(tree_chunk(side, 2), 2, axis=1) for side in (ss, tt)]
    step = jax.vmap(partial(parameters_after_step, params), axis_name="device")
    losses, new = step(*on_devices)
    assert_same(losses, jnp.stack([loss, loss]))
    expected = jax.tree_util.tree_map(lambda p, g: jnp.stack([p - g] * 2), params, grads)
    assert_same(new, expected)


def test_gradients_add_to_what_the_accumulator_holds() -> None:
    params, chunks = parameters(), tree_chunk(batch(4, 1), 2)
    cache = jnp.ones((2, 2, 6))
    zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
    ones = jax.tree_util.tree_map(jnp.ones_like, params)
    base = cache_grad(encode)(params, zeros, cache, **chunks)
    more = cache_grad(encode)(params, ones, cache, **chunks)
    assert_same(more, jax.tree_util.tree_map(lambda g: g + 1, base))


def test_a_thousand_chunks_of_bfloat16_gradients_add_up_within_one_percent() -> None:
    params = {"w": jnp.zeros((8, 6), jnp.bfloat16)}
    x = jax.random.uniform(jax.random.key(1), (1024, 8)).astype(jnp.bfloat16)
    grads = cache_grad(lambda params, x: x @ params["w"])(
        params, params, jnp.ones((1024, 1, 6), jnp.bfloat16), **tree_chunk({"x": x}, 1024)
    )
    assert grads["w"].dtype == jnp.bfloat16
    exact = jnp.broadcast_to(x.astype(jnp.float32).sum(0)[:, None], (8, 6))
    error = jnp.linalg.norm(grads["w"].astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert error < 0.01


def encode_batch(params: Any, batch: Any) -> Any:
    return encode(params, **batch)


CALLS: dict[str, Any] = {
    "a batch": lambda p, chunks: grad_cached(encode_batch)(p, chunks),
    "keywords": lambda p, chunks: grad_cached(encode)(p, **chunks),
    "bound parameters": lambda p, chunks: grad_cached(partial(encode, p))(**chunks),
    "a policy": lambda p, chunks: grad_cached(encode, jax.checkpoint_policies.dots_saveable)(p, chunks["x"]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("chunks", [1, 4])
def test_grad_cached_takes_chunks_and_returns_the_rows_of_the_whole_batch(call: str, chunks: int) -> None:
    """It returned chunks, so that a loss of all rows compared each row with those of its own chunk alone."""
    params, ss, tt = parameters(), batch(12, 1), batch(12, 2)

    def loss(p: Any) -> Any:
        x, y = (CALLS[call](p, tree_chunk(side, chunks)) for side in (ss, tt))
        assert x.shape == y.shape == (12, 6)
        return contrastive(x, y).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    expected, whole = whole_batch(params, ss, tt)
    assert_same(value, expected)
    assert_same(grads, whole)


def sizes_kept(jaxpr: Any) -> set[int]:
    """Elements of the arrays that loops of a program pass on or collect."""
    found: set[int] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            found |= {variable.aval.size for variable in [*equation.invars, *equation.outvars]}
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            found |= sizes_kept(inner) if hasattr(inner, "eqns") else set()
    return found


def test_grad_cached_walks_chunk_by_chunk_and_keeps_no_activation() -> None:
    params, chunks = parameters(), tree_chunk(batch(12, 1), 4)

    def hidden_is_kept(function: Any) -> bool:
        program = jax.make_jaxpr(jax.grad(lambda p: jnp.square(function(p, chunks)).sum()))(params)
        return 4 * 3 * 16 in sizes_kept(program.jaxpr)

    assert not hidden_is_kept(grad_cached(encode_batch))
    assert hidden_is_kept(grad_cached(encode_batch, jax.checkpoint_policies.everything_saveable))


def test_grad_cached_meets_the_same_key_of_a_chunk_again_and_names_misuse() -> None:
    params, chunks = parameters(), tree_chunk(batch(8, 1), 4)
    keys = jax.random.split(jax.random.key(5), 4)

    def whole(p: Any) -> Any:
        return jnp.square(jnp.concatenate([encode(p, chunks["x"][i], keys[i]) for i in range(4)])).sum()

    grads = jax.grad(lambda p: jnp.square(grad_cached(encode)(p, chunks["x"], rng=keys)).sum())(params)
    assert_same(grads, jax.grad(whole)(params))
    with pytest.raises(TypeError, match="tree_chunk"):
        grad_cached(encode)(params)


def test_trees_are_chunked_along_any_axis_and_put_together_again() -> None:
    tree = {"a": jnp.arange(24).reshape(2, 12), "b": [jnp.arange(36).reshape(3, 12)]}
    chunked = tree_chunk(tree, 4, axis=1)
    assert chunked["a"].shape == (2, 4, 3)
    assert_same(tree_unchunk(chunked, axis=1), tree)


def test_rows_that_chunks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="pad the batch"):
        tree_chunk(batch(10, 1), 4)


def test_integer_parameters_have_no_gradient_and_stay() -> None:
    params = {"w": jnp.ones((8, 6)), "steps": jnp.array(3)}
    zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
    grads = cache_grad(lambda params, x: x @ params["w"] * params["steps"])(
        params, zeros, jnp.ones((2, 2, 6)), **tree_chunk(batch(4, 1), 2)
    )
    assert int(grads["steps"]) == 0
    assert float(jnp.abs(grads["w"]).sum()) > 0
