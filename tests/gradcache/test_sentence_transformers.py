"""The losses of sentence-transformers: by their definition, and against the installed release."""

from __future__ import annotations

import copy
import inspect
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcache.sentence_transformers as losses
from gradcache.sentence_transformers import CachedMultipleNegativesRankingLoss, cos_sim
from offload import OffloadModel
from tests.gradients import assert_same_step

WORDS = 20
NAMES = [name for name in losses.__all__ if name.endswith("Loss")]


class Tokenizer:
    """Its texts are numbers of words."""

    def __init__(self, words: int = WORDS) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {str(k): k for k in range(self.words)}

    def batch_decode(self, tokens: Tensor, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [" ".join(str(int(k)) for k in row if k) for row in tokens]


class Encoder(nn.Module):
    """Speaks as a SentenceTransformer does: features in, features with an embedding out."""

    max_seq_length = 8

    def __init__(self, seed: int = 0, dropout: float = 0.0, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)]
        self.words = nn.Sequential(nn.Embedding(2 * WORDS, 8, padding_idx=0), *blocks)
        self.tokenizer = Tokenizer(words)
        self.texts: list[str] = []

    def preprocess(self, texts: list[str]) -> dict[str, Any]:
        self.texts += texts
        rows = [[int(k) for k in text.split()] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def get_embedding_dimension(self) -> int:
        return 8

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        mask = features["attention_mask"][..., None]
        return {**features, "sentence_embedding": (self.words(features["input_ids"]) * mask).sum(1) / mask.sum(1)}


def batch(columns: int, rows: int = 7) -> list[dict[str, Any]]:
    found = []
    for k in range(columns):
        generator = torch.Generator().manual_seed(k)
        lengths = torch.randint(2, 7, (rows, 1), generator=generator)
        mask = (torch.arange(6)[None] < lengths).long()
        ids = torch.randint(1, WORDS, (rows, 6), generator=generator) * mask
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def guided(model: nn.Module, name: str = "CachedGISTEmbedLoss", package: Any = losses, **options: Any) -> Any:
    """A loss of either package; one with a guide gets one whose opinions differ from the model's."""
    options = {"mini_batch_size": 3, **options}
    if name == "CachedGISTEmbedLoss":
        options.setdefault("guide", Encoder(seed=5).eval())
    return getattr(package, name)(model, **options)


GUIDED: list[dict[str, Any]] = [
    {},
    {"margin": 0.1},
    {"margin_strategy": "relative", "margin": 0.05},
    {"contrast_anchors": False, "temperature": 0.05},
    {"contrast_positives": False, "mini_batch_size": 7},
    {"mini_batch_num_tokens": 9},
]


@pytest.mark.parametrize("guide", [{"words": WORDS + 1}, {}])
def test_a_guide_of_another_vocabulary_or_length_gets_texts(guide: dict[str, Any]) -> None:
    models = Encoder(), Encoder()
    same, other = Encoder(seed=5).eval(), Encoder(seed=5, **guide).eval()
    if not guide:
        other.max_seq_length = 4
    features, values = batch(2), []
    for model, each in zip(models, (same, other), strict=True):
        values.append(guided(model, guide=each)(features))
        values[-1].backward()
    torch.testing.assert_close(*values)
    assert_same_step([models[0]], [models[1]])
    assert len(other.texts) == 14
    assert same.texts == []
    assert all(p.grad is None for p in same.parameters())


def test_cosines_are_compared_in_32_bits_under_autocast() -> None:
    loss = guided(Encoder())
    reps = [torch.randn(7, 8, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    expected = loss.calculate_loss(reps[:2], reps[2:])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss.calculate_loss(reps[:2], reps[2:]), expected)


OWN = torch.arange(7)


def ranking(a: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(cos_sim(a, b) * 20, OWN)


def symmetric(a: Tensor, b: Tensor) -> Tensor:
    """The mean of both directions."""
    return (ranking(a, b) + ranking(b, a)) / 2


def margin(a: Tensor, b: Tensor) -> Tensor:
    """Looks at the hardest negative."""
    cosines = cos_sim(a, b)
    hardest = cosines.masked_fill(torch.eye(7, dtype=torch.bool), -torch.inf).max(1).values
    return (F.relu(0.8 - cosines.diagonal()) + F.relu(hardest - 0.3)).mean()


@pytest.mark.parametrize(
    ("name", "definition", "options"),
    [
        ("CachedMultipleNegativesRankingLoss", ranking, {}),
        ("CachedMultipleNegativesRankingLoss", ranking, {"gather_across_devices": True}),  # of the one that there is
        ("CachedMultipleNegativesSymmetricRankingLoss", symmetric, {}),
        ("MegaBatchMarginLoss", margin, {}),
        ("MegaBatchMarginLoss", margin, {"use_mini_batched_version": False}),
    ],
)
@pytest.mark.parametrize("size", [2, 7, 32])
def test_value_and_gradients_are_the_batch_s(name: str, definition: Any, options: dict[str, Any], size: int) -> None:
    bare, ours = Encoder(), Encoder()
    expected = definition(*(bare(column)["sentence_embedding"] for column in batch(2)))
    (expected * 0.5).backward()
    value = guided(ours, name, mini_batch_size=size, **options)(batch(2), torch.zeros(7))
    (value * 0.5).backward()
    torch.testing.assert_close(value, expected)
    assert_same_step([bare], [ours])


@pytest.mark.parametrize("name", NAMES)
def test_a_streamed_model_is_loaded_twice_for_all_mini_batches_and_columns(name: str) -> None:
    bare, ours = Encoder(), Encoder()
    ours.words = OffloadModel(ours.words, "cpu", num_slices=4, checkpoint_activation=True)
    features, values = batch(2), []
    for model in (bare, ours):
        values.append(guided(model, name)(features, None))
        values[-1].backward()
    torch.testing.assert_close(*values)
    assert_same_step([bare], [ours])
    assert ours.words.statistics().shard_loads <= 2 * 4


#: Options of each loss, and what the error says.
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "CachedGISTEmbedLoss": [
        ({"margin_strategy": "none"}, "margin_strategy"),
        ({"temperature": 0.0}, "temperature"),
        ({"guide": nn.Linear(2, 2)}, r"guide\.tokenizer"),
    ],
    "CachedMultipleNegativesRankingLoss": [
        ({"directions": ("doc_to_query",)}, "query_to_doc"),
        ({"directions": ("query_to_doc", "sideways")}, "sideways"),
        ({"partition_mode": "apart"}, "partition_mode"),
        ({"partition_mode": "per_direction", "directions": ("query_to_doc", "doc_to_doc")}, "positive pair"),
        ({"hardness_mode": "harder"}, "hardness_mode"),
        ({"hardness_mode": "all_negatives", "hardness_strength": -1.0}, "hardness_strength"),
        ({"scale": 0.0}, "scale"),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_misuse_is_named_before_the_model_runs(name: str) -> None:
    class Unusable(Encoder):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            raise AssertionError("the model ran")

    loss = guided(Unusable(), name)
    with pytest.raises(ValueError, match="anchors and of positives"):
        loss(batch(1), None)
    for wrong, message in (*WRONG.get(name, ()), ({"mini_batch_num_tokens": 0}, "mini_batch_num_tokens")):
        with pytest.raises(ValueError, match=message):
            guided(Encoder(), name, **wrong)
    if name == "MegaBatchMarginLoss":
        with pytest.raises(ValueError, match="CachedMultipleNegativesRankingLoss for given ones"):
            loss(batch(3), None)
    if name == "CachedGISTEmbedLoss":
        with pytest.raises(ValueError, match="columns of representations by the guide, got none"):
            loss.calculate_loss([torch.zeros(2, 2)] * 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_has_its_configuration_and_its_value(name: str) -> None:
    def config_of(loss: Any) -> dict[str, Any]:
        return {key: value for key, value in loss.get_config_dict().items() if key != "guide"}

    loss = guided(Encoder(), name)
    again, config = copy.deepcopy(loss), config_of(loss)
    assert config_of(again) == config
    torch.testing.assert_close(again(batch(2), None), loss(batch(2), None))
    assert "title" in loss.citation
    accepted = inspect.signature(type(loss).__init__).parameters
    arguments = {key: value for key, value in config.items() if key in accepted and key != "similarity_fct"}
    assert config_of(guided(Encoder(), name, **arguments)) == config


# --- the ranking loss -------------------------------------------------------------------------------------------------


def test_another_similarity_is_used_and_features_that_it_cannot_take_are_named() -> None:
    model = Encoder()
    columns = batch(2)
    reps = [model(column)["sentence_embedding"] for column in columns]
    loss = CachedMultipleNegativesRankingLoss(model, 1.0, lambda a, b: a @ b.T, 2)(columns, None)
    torch.testing.assert_close(loss, F.cross_entropy(reps[0] @ reps[1].T, OWN))
    flat = {"input_ids": torch.zeros(9, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 4, 9])}
    with pytest.raises(ValueError, match="pad instead of flattening"):
        CachedMultipleNegativesRankingLoss(model)([flat, flat])
    with pytest.raises(ValueError, match="attention_mask"):
        CachedMultipleNegativesRankingLoss(model, mini_batch_num_tokens=8)([{"input_ids": flat["input_ids"]}] * 2)


class Widths(Encoder):
    """Notes the shape of what it encodes, and keeps what it computes in the dict that it got."""

    def __init__(self) -> None:
        super().__init__()
        shapes: list[tuple[int, ...]] = []
        # Of functions, nothing is put back: a list that an object holds would tell of one forward a chunk.
        self.note, self.shapes = shapes.append, lambda: shapes
        self.keys: set[str] = set()

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        self.note(tuple(features["input_ids"].shape))
        self.keys |= features.keys()
        assert features["token_type_ids"].shape == features["input_ids"].shape
        assert features["prompt_length"] == 3
        features.update(super().forward(features))
        return features


def padded(lengths: list[int], left: int = 0) -> dict[str, Any]:
    width = max(lengths) + left
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width) % WORDS
    column = torch.arange(width)[None, :]
    mask = ((column >= left) & (column < left + torch.tensor(lengths)[:, None])).long()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": mask * 0, "prompt_length": 3}


@pytest.mark.parametrize("tokens", [None, 8, 1])
def test_mini_batches_are_as_wide_as_their_longest_row_and_hold_so_many_tokens(tokens: int | None) -> None:
    bare, ours = Widths(), Widths()
    columns = [padded([3, 2, 7, 1, 1]), padded([2, 2, 2, 2, 6], left=1)]
    expected = F.cross_entropy(
        20 * cos_sim(*(bare(column)["sentence_embedding"] for column in copy.deepcopy(columns))), torch.arange(5)
    )
    expected.backward()
    loss = CachedMultipleNegativesRankingLoss(ours, mini_batch_size=2, mini_batch_num_tokens=tokens)(columns)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_step([bare], [ours])
    shapes: dict[int | None, list[tuple[int, ...]]] = {
        None: [(2, 3), (2, 7), (1, 1), (2, 3), (2, 3), (1, 7)],
        8: [(2, 3), (2, 7), (1, 1), (4, 3), (1, 7)],
        1: [(1, 3), (1, 2), (1, 7), (1, 1), (1, 1), *[(1, 3)] * 4, (1, 7)],
    }
    assert ours.shapes() == shapes[tokens] * 2
    assert "sentence_embedding" not in ours.keys
    assert all("sentence_embedding" not in column for column in columns)


def test_a_wrapper_that_weighs_gradients_of_representations_alone_refuses_a_similarity_that_trains() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return cos_sim(a, b) * self.factor

    loss = CachedMultipleNegativesRankingLoss(Encoder(), similarity_fct=Learned())
    columns = batch(2)
    loss(columns).backward()  # by itself it is trained
    assert loss.similarity_fct.factor.grad is not None  # type: ignore[attr-defined]
    loss.calculate_loss = loss.calculate_loss
    with pytest.raises(ValueError, match="without trainable parameters"):
        loss(columns)


def test_a_forward_restored_before_the_second_pass_is_refused() -> None:
    """As AdaptiveLayerLoss does around any loss: the second pass would run another model."""
    model = Encoder()
    loss = CachedMultipleNegativesRankingLoss(model)
    original = model.forward
    model.forward = lambda given: original(given)
    value = loss(batch(2))
    del model.forward
    with pytest.raises(RuntimeError, match="AdaptiveLayerLoss"):
        value.backward()


# --- against the installed release ------------------------------------------------------------------------------------


@pytest.fixture
def release() -> Any:
    return pytest.importorskip("sentence_transformers.sentence_transformer.losses", reason="needs the extra")


@pytest.fixture
def make_tokenizer(release: Any) -> Any:
    """Makes a tokenizer of transformers, which the release asks for; its texts are numbers of words, as above."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import models, pre_tokenizers

    fast: Any = pytest.importorskip("transformers", reason="needs the extra").PreTrainedTokenizerFast

    def make(words: int = WORDS) -> Any:
        vocabulary = {"[PAD]": 0, **{str(k): k for k in range(1, words)}}
        rust = Rust(models.WordLevel(vocabulary, unk_token="[PAD]"))
        rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return fast(tokenizer_object=rust, pad_token="[PAD]", unk_token="[PAD]")

    return make


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_the_installed_release(name: str, release: Any) -> None:
    def arguments(package: Any) -> list[tuple[str, Any]]:
        found = inspect.signature(getattr(package, name).__init__).parameters.values()
        return [(p.name, getattr(p.default, "__name__", p.default)) for p in found]

    ours, theirs = arguments(losses), arguments(release)
    assert [each[0] for each in ours] == [each[0] for each in theirs]
    assert ours == theirs


def both(release: Any, make_tokenizer: Any, name: str, **options: Any) -> tuple[Any, Any]:
    found = []
    guide_words = options.pop("guide_words", WORDS)
    for package in (release, losses):
        transformer: Any = pytest.importorskip("sentence_transformers").SentenceTransformer
        encoder = Encoder(dropout=options.get("dropout", 0.0))
        encoder.tokenizer = make_tokenizer()
        guide = Encoder(seed=5, words=guide_words)
        guide.tokenizer = make_tokenizer(guide_words)
        model = transformer(modules=[encoder], device="cpu")
        chosen = {"guide": transformer(modules=[guide], device="cpu")} if "GIST" in name else {}
        rest = {key: value for key, value in options.items() if key != "dropout"}
        found.append(guided(model.train(), name, package, **chosen, **rest))
    return found[0], found[1]


RANKING: list[dict[str, Any]] = [
    {},
    {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    {"directions": ("doc_to_query", "query_to_doc"), "partition_mode": "joint"},
    {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
    *(
        {"hardness_mode": mode, "hardness_strength": 5.0}
        for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")
    ),
    {"hardness_mode": "all_negatives", "hardness_strength": 3.0, "directions": ("query_to_doc", "doc_to_doc")},
    {"mini_batch_num_tokens": 9},
    {"gather_across_devices": True},
]

CASES = [("CachedGISTEmbedLoss", options) for options in (*GUIDED, {"guide_words": WORDS + 1}, {"dropout": 0.3})]
CASES += [(name, {"dropout": 0.3}) for name in NAMES if "GIST" not in name]
CASES += [("CachedMultipleNegativesRankingLoss", options) for options in RANKING]
CASES += [("MegaBatchMarginLoss", {"use_mini_batched_version": False, "positive_margin": 0.5})]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_values_and_gradients_are_those_of_the_installed_release(
    name: str, options: dict[str, Any], columns: int, release: Any, make_tokenizer: Any
) -> None:
    if name == "MegaBatchMarginLoss" and columns > 2:
        pytest.skip("takes two columns")
    values, found = [], both(release, make_tokenizer, name, **dict(options))
    for loss in found:
        torch.manual_seed(3)
        values.append(loss(batch(columns), None))
        (values[-1] * 0.5).backward()
    torch.testing.assert_close(values[1], values[0])
    assert_same_step([found[0].model], [found[1].model], 1e-5)  # gradients up to 10
    assert getattr(found[1], "temperature", None) == getattr(found[0], "temperature", None)
    theirs, ours = (loss.get_config_dict() for loss in found)
    theirs.pop("guide", None), ours.pop("guide", None)
    assert ours == theirs
    if "dropout" not in options:
        with torch.no_grad():
            torch.testing.assert_close(found[1](batch(columns), None), found[0](batch(columns), None))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "MegaBatchMarginLoss"])
@pytest.mark.parametrize(("dimensions", "weights"), [(-1, [1.0, 0.3, 2.0]), (1, [1.0, 0.3, 2.0]), (2, None)])
def test_matryoshka_around_it_gives_the_release_s_gradient(
    name: str, dimensions: int, weights: Any, release: Any, make_tokenizer: Any
) -> None:
    found = both(release, make_tokenizer, name)
    wrapped = [release.MatryoshkaLoss(loss.model, loss, [8, 4, 2], weights, dimensions) for loss in found]
    values = []
    for each in wrapped:
        random.seed(3)
        values.append(each(batch(3), None))
        (values[-1] * 0.5).backward()
        with torch.no_grad():
            random.seed(3)
            torch.testing.assert_close(each(batch(3), None), values[-1].detach())
    torch.testing.assert_close(values[1].detach(), values[0].detach())
    assert_same_step([found[0].model], [found[1].model], 1e-5)  # gradients up to 10


def test_every_cached_loss_of_the_installed_release_has_a_replacement(release: Any) -> None:
    """Of those for a SentenceTransformer; others encode to something else than one embedding for each text."""
    classes = {name: value for name, value in vars(release).items() if isinstance(value, type)}
    caching = {name for name, kind in classes.items() if getattr(kind, "uses_gradient_cache", False)}
    caching |= {name for name, kind in classes.items() if "mini_batch_num_tokens" in inspect.signature(kind).parameters}
    assert caching == set(NAMES)
