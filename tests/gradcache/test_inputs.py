"""What users pass, what a row of it is, and outputs that a loss reads in part or cannot read."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcache import GradCache
from gradcache.chunks import split_input
from gradcache.functional import cached, cat_input_tensor
from gradcache.loss import SimpleContrastiveLoss
from gradcache.sentence_transformers import CachedMultipleNegativesRankingLoss, MegaBatchMarginLoss
from offload import MemoryPolicy, OffloadModel
from tests.gradcache.towers import WAYS, Calls, Output, energy, in_chunks, offloaded
from tests.gradients import assert_same_step


class Overwriting(nn.Module):
    """Masks its input in place, as some tokenizing wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x.mul_(mask)
        x.add_(1)
        return self.linear(x)


def cut(model_input: Mapping[str, Tensor], size: int) -> list[UserDict[str, Tensor]]:
    rows = len(model_input["x"])
    return [UserDict({k: v[i : i + size] for k, v in model_input.items()}) for i in range(0, rows, size)]


def test_a_model_that_writes_over_a_tokenizer_s_mapping_meets_a_copy_in_both_passes() -> None:
    """The mapping is opaque to torch: the second pass ran on what the first had written, and so did the user."""
    bare, model = Overwriting(), Overwriting()
    inputs = [UserDict({"x": torch.randn(7, 8), "mask": torch.ones(7, 8)}) for _ in range(2)]
    before = [each["x"].clone() for each in inputs]
    reps = [bare(each["x"].clone(), each["mask"]) for each in inputs]
    SimpleContrastiveLoss()(*reps).backward()
    GradCache([model, model], 3, SimpleContrastiveLoss(), split_input_fn=cut)(*inputs)
    assert_same_step([bare], [model])
    assert all(torch.equal(each["x"], old) for each, old in zip(inputs, before, strict=True))


class Clip(nn.Module):
    """Two encoders as methods of one module, with a buffer that each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(8, 6), nn.Linear(5, 6)
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.3)

    def encode_image(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.image(x)))

    def encode_text(self, x: Tensor) -> Tensor:
        return self.norm(self.text(x).tanh())


def test_bound_methods_are_towers() -> None:
    bare, clip = Clip(), Clip()
    x, y = torch.randn(8, 8), torch.randn(8, 5)
    torch.manual_seed(1)
    expected = in_chunks([bare.encode_image, bare.encode_text], 4, SimpleContrastiveLoss(), x, y)
    torch.manual_seed(1)
    loss = GradCache([clip.encode_image, clip.encode_text], 4, SimpleContrastiveLoss())(x, y)
    torch.testing.assert_close(loss, expected)
    assert_same_step([bare], [clip])


def test_a_callable_keeps_gradients_of_before_after_an_exception_and_can_be_evaluated() -> None:
    clip, calls = Clip(), []
    clip.image.weight.grad = before = torch.ones(6, 8)

    def fails_in_the_second_pass(reps: Tensor) -> Tensor:
        calls.append(len(reps))
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return reps

    cache = GradCache([lambda x: clip.encode_image(x)], 4, energy, None, fails_in_the_second_pass)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache(torch.randn(8, 8))
    assert clip.image.weight.grad is before
    assert torch.equal(before, torch.ones(6, 8))
    assert clip.image.bias.grad is None
    with torch.no_grad():
        assert not GradCache([clip.encode_image], 4, energy)(torch.randn(8, 8)).requires_grad


def test_an_argument_that_is_no_model_is_named() -> None:
    for models, error in (
        ([3], "int among models"),
        ([nn.Linear], "type among models"),
        (Clip().encode_text, r"models=\[model\]"),
    ):
        with pytest.raises(TypeError, match=error):
            GradCache(models, 2, SimpleContrastiveLoss())  # type: ignore[arg-type]


def test_integer_types_of_another_library_are_accepted_as_sizes() -> None:
    x = torch.randn(6, 8)
    for sizes in ([np.int64(3)], np.int32(2), np.array([4]), (torch.tensor(3),)):
        model = nn.Linear(8, 4)
        assert GradCache([model], sizes, lambda r: r.square().sum())(x) > 0  # type: ignore[arg-type]
    for wrong in ([2.0], [True], ["3"], [0], [np.float32(2)]):
        with pytest.raises(ValueError, match="at least 1 row"):
            GradCache([nn.Linear(8, 4)], wrong, lambda r: r.sum())  # type: ignore[arg-type]


class Fields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Output:
        out = self.pooler(x)
        return Output(hidden=x * 2, pooled=out, pair=(out, (x,)), ids=torch.arange(len(x)), absent=None)


#: What a loss reads of it.
READS: dict[str, Callable[[Any], Tensor]] = {
    "hidden": lambda output: output["hidden"],
    "pooled": lambda output: output["pooled"],
    "a tuple and integers": lambda output: (
        output["pair"][0] * output["pair"][1][0].detach() + 0 * output["ids"][:, None]
    ),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("way", ["step", "encode", "shards", "shards together", "wrapped"])
def test_an_output_with_fields_that_the_loss_ignores(way: str, read: str) -> None:
    """They have no gradient, which is not that they are absent."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(8, 6), Fields())
    model: Any = copy.deepcopy(bare)
    choose = READS[read]
    if way.startswith("shards") or way == "wrapped":
        memory = MemoryPolicy.fixed(activation_bytes="1MiB", join_chunks=True) if way == "shards together" else None
        model = offloaded(model, memory=memory)
    towers = [Calls(lambda self, x: choose(self.members[0](x)), model) if way == "wrapped" else model] * 2
    x, y = torch.randn(2, 6, 8)
    SimpleContrastiveLoss()(choose(bare(x)), choose(bare(y))).backward()

    def loss(*reps: Any) -> Tensor:
        return SimpleContrastiveLoss()(*(reps if way == "wrapped" else map(choose, reps)))

    for _ in range(2 if way == "shards together" else 1):  # once their memory is known
        model.zero_grad()
        WAYS["encode" if way == "encode" else "step"](towers, 2, loss, x, y)
    assert_same_step([bare], [model])


def test_a_cached_method_of_a_plain_object_counts_buffers_once() -> None:
    """The object is no module; the modules that it holds were not seen, and BatchNorm counted both passes."""

    class Trainer:
        def __init__(self) -> None:
            self.parts = {"model": nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))}

        @cached
        def encode(self, x: Tensor) -> Tensor:
            return self.parts["model"](x)

    trainer = Trainer()
    leaf, again = trainer.encode(torch.randn(4, 8))
    leaf.square().sum().backward()
    again(leaf)
    assert trainer.parts["model"][1].num_batches_tracked == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("given", ["plain", "inference"])
def test_inference_mode_returns_the_loss_as_no_grad_does(streamed: bool, given: str) -> None:
    x, y = torch.randn(2, 8, 8)
    losses, nets = [], []
    for mode in (torch.no_grad(), torch.inference_mode()):
        torch.manual_seed(0)
        net = nn.Sequential(InPlace(), nn.Linear(8, 8), nn.BatchNorm1d(8), InPlace(), nn.Dropout(0.2), nn.Linear(8, 4))
        tower = offloaded(net) if streamed else net
        cache = GradCache([tower, tower], 3, SimpleContrastiveLoss(), process_fn=None if streamed else lambda x: x * 1)
        torch.manual_seed(1)
        with mode:
            inputs = (x.clone(), y.clone()) if given == "inference" else (x, y)
            loss = cache(*inputs)
            reps = cache.encode(*inputs)
            assert torch.equal(inputs[0], x)
        assert not loss.requires_grad
        assert not any(rep.requires_grad for rep in reps)
        torch.manual_seed(2)
        cache(x, y)  # and a step after it trains
        losses.append(loss.item())
        nets.append(tower)
    assert losses[0] == losses[1]
    assert_same_step([nets[0]], [nets[1]])


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


LOSS = SimpleContrastiveLoss()


class Encoder(nn.Module):
    """Notes the rows of each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = nn.Embedding(128, 8), nn.Linear(8, 6)
        self.rows: set[int] = set()

    def forward(self, ids: Tensor) -> Tensor:
        self.rows.add(len(ids))
        out: Tensor = self.linear(self.table(ids).mean(1))
        return out


TEXTS = [f"text {'x' * (k % 3)}{k}" for k in range(8)]


def tokens(text: str) -> Tensor:
    return torch.tensor([ord(c) for c in text])


def padded(rows: Any) -> Tensor:
    return nn.utils.rnn.pad_sequence([row.clone() for row in rows], batch_first=True)


#: What a user passes, and the process_fn that makes the model's input of a part of it.
ROWS: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "texts": (TEXTS, lambda part: padded(map(tokens, part))),
    "a tuple of texts": (tuple(TEXTS), lambda part: padded(map(tokens, part))),
    "tensors of several lengths": ([tokens(text) for text in TEXTS], padded),
    "tensors of one length": ([tokens(text.ljust(9)) for text in TEXTS], padded),
    "dicts of tensors": ([{"ids": tokens(t)} for t in TEXTS], lambda part: padded(row["ids"] for row in part)),
    "dicts of texts": ([{"text": t} for t in TEXTS], lambda part: padded(tokens(row["text"]) for row in part)),
    "pairs of texts": ([[t, "?"] for t in TEXTS], lambda part: padded(tokens(row[0]) for row in part)),
    "lists in a dict": (
        {"text": TEXTS, "more": [tokens(t) for t in TEXTS], "last": torch.arange(8)},
        lambda part: padded(map(tokens, part["text"])) + 0 * len(part["more"]) * part["last"][:, None],
    ),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("execution", ["chunks", "shards"])
def test_a_list_with_process_fn_is_cut_between_its_rows(kind: str, execution: str) -> None:
    given, process = ROWS[kind]
    bare = nn.Sequential(Encoder(), nn.Tanh())
    ours = copy.deepcopy(bare)
    widest = process(given).size(1)

    def to_one_width(part: Any) -> Tensor:
        ids = process(part)
        return F.pad(ids, (0, widest - ids.size(1)))

    tower = OffloadModel(ours, "cpu", num_slices=2, checkpoint_activation=True) if execution == "shards" else ours
    cache = GradCache([tower, tower], 3, LOSS, process_fn=to_one_width)
    LOSS(bare(process(given)), bare(process(given))).backward()
    cache(given, given)
    assert_same_step([bare], [ours])
    assert ours[0].rows <= {2, 3}


@pytest.mark.parametrize("kind", [list, tuple])
def test_texts_without_process_fn_are_the_model_s_one_argument(kind: Any) -> None:
    class OfTexts(Encoder):
        def forward(self, texts: Any) -> Tensor:
            assert type(texts) is kind
            return super().forward(padded(tokens(text.ljust(9)) for text in texts))

    bare, ours = OfTexts(), OfTexts()
    texts = kind(TEXTS)
    LOSS(bare(texts), bare(texts)).backward()
    GradCache([ours, ours], 3, LOSS)(texts, texts)
    assert_same_step([bare], [ours])
    assert ours.rows == {2, 3}


def test_lists_without_process_fn_and_with_positions_hold_arguments() -> None:
    x, table = torch.zeros(4, 2), torch.zeros(3)
    assert [len(part) for part in split_input([x, x], 3)] == [2, 2]
    first, _ = split_input([x, table], 3, broadcast=(1,), lists_are_rows=True)
    assert first[1] is table
    with pytest.raises(TypeError, match="tuple of plain values"):
        split_input({"x": x, "sizes": (1, 2)}, 3, lists_are_rows=True)


def test_images_of_several_sizes_are_led_to_split_input_fn() -> None:
    with pytest.raises(ValueError, match="split_input_fn, which knows what belongs to a row"):
        split_input({"pixel_values": torch.zeros(30, 4), "grid": torch.zeros(5, 3), "ids": torch.zeros(5, 7)}, 2)
    with pytest.raises(ValueError, match="with process_fn, the members of a list are rows"):
        split_input([torch.zeros(3, 4), torch.zeros(5, 4)], 2)


def test_rows_of_a_list_that_a_split_function_drops_are_noticed() -> None:
    cache = GradCache([Encoder()], 3, lambda r: r.sum(), lambda rows, n: [rows[:n]], process_fn=padded)
    with pytest.raises(ValueError, match="all 8 rows, got 3"):
        cache([tokens(text.ljust(9)) for text in TEXTS])


# --- models that return other rows than they were given --------------------------------------------------------------


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()

    def forward(self, *views: Tensor) -> Tensor:
        return torch.cat([self.encoder(view) for view in views])


def between_views(z: Tensor) -> Tensor:
    a, b = F.normalize(z, dim=-1).chunk(2) if z.dim() == 2 else F.normalize(z, dim=-1).unbind(1)
    return F.cross_entropy(a @ b.T * 10, torch.arange(len(a)))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x + 1])


@pytest.mark.parametrize("execution", ["chunks", "shards", "wrapped", "encode", "split_input_fn", "process_fn"])
def test_views_one_after_the_other_are_refused_before_a_loss_is_computed(execution: str) -> None:
    model: nn.Module = nn.Sequential(Views(), Twice())
    options: dict[str, Any] = {}
    if execution == "shards":
        model = OffloadModel(model, "cpu", num_slices=2, checkpoint_activation=True)
    elif execution == "wrapped":
        model = nn.Sequential(OffloadModel(nn.Sequential(Views()), "cpu", checkpoint_activation=True), Twice())
    elif execution == "split_input_fn":
        options["split_input_fn"] = lambda x, n: list(x.split(n))
    elif execution == "process_fn":
        model, options["process_fn"] = nn.Linear(6, 4).double(), lambda x: torch.cat([x, x.roll(1, 1)])
    calls: list[int] = []
    if counted := execution in ("chunks", "encode"):
        model.register_forward_hook(lambda *_: calls.append(1))

    def loss_fn(z: Tensor) -> Tensor:
        raise AssertionError("no loss is computed")

    cache = GradCache([model], 4, loss_fn, **options)
    x = torch.randn(8, 6).double()
    with pytest.raises(ValueError, match=r"got 8 for 4 rows.*return shape \(rows, 2, ...\).*get_rep_fn=lambda"):
        (cache.encode if execution == "encode" else cache)(x)
    assert len(calls) == counted
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_advised_get_rep_fn_gives_the_whole_batch_s_step() -> None:
    bare, ours = Views(), Views()
    views = [torch.randn(8, 6).double() for _ in range(2)]
    expected = between_views(bare(*views))
    expected.backward()
    by_row = GradCache([ours], 3, between_views, get_rep_fn=lambda out: out.unflatten(0, (2, -1)).transpose(0, 1))
    torch.testing.assert_close(by_row(views), expected.detach())
    assert_same_step([bare], [ours])


def test_pooled_chunks_are_refused_and_a_split_function_may_say_what_a_row_is() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor, group: Tensor) -> Tensor:
            sums = torch.zeros(int(group.max()) - int(group.min()) + 1, 4)
            return sums.index_add(0, group - group.min(), self.linear(x))

    bare, ours = Pooled(), Pooled()
    x, group = torch.randn(8, 6), torch.tensor([0, 0, 1, 2, 2, 2, 3, 3])
    with pytest.raises(ValueError, match=r"got 2 for 3 rows.*split_input_fn of your own"):
        GradCache([ours], 3, lambda z: z.square().sum())([x, group])
    bare(x, group).square().sum().backward()
    cache = GradCache(
        [ours], 3, lambda z: z.square().sum(), lambda given, _: [[t[:3] for t in given], [t[3:] for t in given]]
    )
    cache([x, group])
    assert_same_step([bare], [ours])


# --- outputs that are no representations -----------------------------------------------------------------------------


class Cache:
    """As the keys and values that a decoder returns: an object, unequal to any other."""


class Returns(nn.Module):
    def __init__(self, output: Callable[[Tensor, int], Any]) -> None:
        super().__init__()
        self.linear, self.output, self.calls = nn.Linear(8, 4), output, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.output(self.linear(x), self.calls)


def user_s_loss(a: Any, b: Any) -> Tensor:
    return LOSS(a, b)


Case = tuple[Callable[[Tensor, int], Any], Any, str, int]
#: Outputs, the loss, what the error says, and the chunks that ran before.
OUTPUTS: dict[str, Case] = {
    "output, loss of tensors": (lambda z, _: Output(a=z), LOSS, "AttributeError.*Output.*get_rep_fn", 6),
    "tuple, loss of tensors": (lambda z, _: (z, z), LOSS, "AttributeError.*tuple.*get_rep_fn", 6),
    "output, loss of the user": (lambda z, _: Output(a=z), user_s_loss, "AttributeError.*Output.*get_rep_fn", 6),
    "a cache": (lambda z, _: Output(a=z, b=Cache()), user_s_loss, r"Cache \(output\['b'\]\).*get_rep_fn", 2),
    "a scalar": (lambda z, _: {"a": z, "scale": z.sum()}, user_s_loss, r"\['scale'\].*get_rep_fn", 1),
    "a scalar in a tuple": (lambda z, _: (z, (z.sum(), z)), user_s_loss, r"\(output\[1\]\[0\]\).*get_rep_fn", 1),
    "other rows": (lambda z, _: {"a": z, "b": z[:1]}, user_s_loss, r"\(1, 4\) \(output\['b'\]\).*get_rep_fn", 1),
    "widths": (lambda z, k: {"a": z[:, : 4 - k // 2, None]}, user_s_loss, r"\['a'\]\) from chunk 1.*pad all chunks", 2),
    "another structure": (lambda z, k: (z,) * k, user_s_loss, "same structure from every chunk.*get_rep_fn", 2),
    "nothing": (lambda z, _: "text", user_s_loss, "got str; pass get_rep_fn", 1),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_output_that_is_no_representation_is_named_as_soon_as_it_is_seen(kind: str) -> None:
    output, loss, error, chunks = OUTPUTS[kind]
    model = Returns(output)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(9, 8)
    with pytest.raises((TypeError, ValueError), match=error):
        GradCache([model, model], 3, loss)(x, x)
    assert len(calls) == chunks
    assert model.linear.weight.grad is None


def test_a_loss_that_reads_members_gets_the_output_and_its_own_errors_stay() -> None:
    model = Returns(lambda z, _: Output(hidden=z))
    x = torch.randn(9, 8)
    GradCache([model, model], 3, lambda a, b: LOSS(a.hidden, b.hidden))(x, x)
    assert model.linear.weight.grad is not None
    LOSS(*(rep.hidden for rep in GradCache([model, model], 3, LOSS).encode(x, x))).backward()

    def fails(*reps: Tensor) -> Tensor:
        raise TypeError("of the user")

    with pytest.raises(TypeError, match=r"^of the user$"):
        GradCache([model], 3, fails, get_rep_fn=lambda out: out.hidden)(x)


def test_cached_calls_that_return_a_model_s_whole_output_are_named() -> None:
    encode = cached(Returns(lambda z, _: Output(hidden=z)))
    leaf, _ = encode(torch.randn(4, 8))
    with pytest.raises(TypeError, match=r"of type Output; .*let a cached function return them"):
        cat_input_tensor(LOSS)([leaf], [leaf])


@pytest.mark.parametrize("loss", [CachedMultipleNegativesRankingLoss, MegaBatchMarginLoss])
@pytest.mark.parametrize("cached_version", [True, False])
def test_the_replacements_name_the_kind_of_model_that_they_want(loss: Any, cached_version: bool) -> None:
    class MultiVector(nn.Module):
        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {**features, "token_embeddings": features["input_ids"].double()}

    made = loss(MultiVector(), mini_batch_size=2)
    made.uses_gradient_cache = cached_version
    with pytest.raises(TypeError, match=r"multi_vector_encoder.losses"):
        made([{"input_ids": torch.ones(4, 3)}] * 2)
    with pytest.raises(TypeError, match=r"cross_encoder.losses"):
        made([["a query"] * 4, ["a document"] * 4])
