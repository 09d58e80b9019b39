"""Families of transformers, by tiny configs: loss, gradients, buffers and generator state of the plain model.

In an environment of their own (``tests/with_transformers.sh``), where these are not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from tests.offload.side_by_side import advance, assert_equal, offloaded

tf: Any = pytest.importorskip("transformers", reason="needs transformers: pip install transformers peft")

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{of}")
    for of in (":FutureWarning", "fan_in_fan_out", "Model has `tie_", "OffloadModel streams")
]

WORDS = 100
LENGTHS = (8, 6, 8)
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: Dropout in every family: most of these have none unless they are told.
DROPPING = {"attention_dropout": 0.1, "embedding_dropout": 0.1, "mlp_dropout": 0.1}
DECODER = {**SMALL, "num_key_value_heads": 1, "use_cache": False, "attention_dropout": 0.1}
VISION = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "mlp_ratio": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "drop_path_rate": 0.1,
    "attention_dropout": 0.1,
}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_heads": 2, "use_cache": False}


def text(k: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(k)
    ids = torch.randint(5, WORDS, (2, LENGTHS[k]), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, LENGTHS[k] // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pixels(k: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(k))}


def pairs(k: int) -> dict[str, Tensor]:
    return {**text(k), "decoder_input_ids": text(k)["input_ids"][:, :4]}


class Family(NamedTuple):
    make: Callable[[], Any]
    blocks: Any
    inputs: Callable[[int], dict[str, Tensor]] = text
    #: Whether sums of gradients have the same order: not where a block uses a side input several times.
    exact: bool = True


FAMILIES = {
    "bert": Family(lambda: tf.BertModel(tf.BertConfig(**SMALL)), "encoder.layer"),
    "gpt2": Family(
        lambda: tf.GPT2Model(
            tf.GPT2Config(
                vocab_size=WORDS, n_embd=32, n_layer=3, n_head=2, use_cache=False, bos_token_id=1, eos_token_id=2
            )
        ),
        "h",
    ),
    "llama with a tied head": Family(
        lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER, tie_word_embeddings=True)), "model.layers"
    ),
    "qwen3": Family(lambda: tf.Qwen3Model(tf.Qwen3Config(**DECODER, head_dim=16)), "layers"),
    "t5": Family(lambda: tf.T5Model(tf.T5Config(**T5)), ("encoder.block", "decoder.block"), pairs, exact=False),
    "modernbert": Family(
        lambda: tf.ModernBertModel(
            tf.ModernBertConfig(**SMALL, **DROPPING, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2)
        ),
        "layers",
    ),
    "vit": Family(lambda: tf.ViTModel(tf.ViTConfig(**VISION)), None, pixels),
    "clip": Family(
        lambda: tf.CLIPModel(
            tf.CLIPConfig(
                text_config={**SMALL, "max_position_embeddings": 16, "attention_dropout": 0.1},
                vision_config=VISION,
                projection_dim=16,
            )
        ),
        ("vision_model.encoder.layers", "text_model.encoder.layers"),
        lambda k: {**text(k), **pixels(k)},
    ),
    "mixtral": Family(
        lambda: tf.MixtralModel(tf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)), "layers"
    ),
}

everywhere = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def loss_of(output: Any) -> Tensor:
    names = ("last_hidden_state", "logits", "pooler_output", "text_embeds", "image_embeds", "logits_per_text")
    found = [getattr(output, name, None) for name in names]
    total = torch.zeros(())
    for x in found:
        if x is not None:
            total = total + x.square().mean() + 0.01 * x.sin().sum()
    return total


def make(family: Family) -> Any:
    torch.manual_seed(0)
    return family.make().train()


def assert_steps_equal(bare: Any, model: Any, family: Family) -> None:
    for k in range(2):
        found = []
        for each in (bare, model):
            torch.manual_seed(k)
            loss = loss_of(each(**family.inputs(k)))
            loss.backward()
            found.append((loss.detach(), torch.get_rng_state()))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        assert not torch.equal(found[0][1], torch.Generator().manual_seed(k).get_state())  # dropout drew
        assert_equal(bare, model, exact=family.exact)


@everywhere
@pytest.mark.parametrize("recompute", [True, False])
def test_steps_are_those_of_the_plain_model(family: Family, recompute: bool) -> None:
    bare = make(family)
    model = offloaded(bare, blocks=family.blocks, checkpoint_activation=recompute)
    assert isinstance(model, type(bare))
    assert list(model.state_dict()) == list(bare.state_dict())
    assert_steps_equal(bare, model, family)


@everywhere
def test_chunks_of_different_lengths_take_one_visit(family: Family, tmp_path: Path) -> None:
    bare = make(family).eval()  # dropout would be drawn block by block
    model = offloaded(bare, tmp_path, blocks=family.blocks)
    chunks = [((), family.inputs(k)) for k in range(3)]
    outputs = model.forward_chunks(chunks, output_fn=loss_of)
    torch.autograd.backward(outputs, [torch.tensor(k + 1.0) for k in range(3)])
    for k, output in enumerate(outputs):
        loss = loss_of(bare(**family.inputs(k)))
        assert torch.equal(loss, output)
        (loss * (k + 1)).backward()
    assert_equal(bare, model, exact=False)
    assert model.statistics().shard_loads <= 2 * len(model._homes.shards)


def _blocks_in(model: Any, blocks: Any) -> Any:
    """The names of lists of blocks, also inside of a model with adapters."""
    if blocks is None or not hasattr(model, "base_model") or not hasattr(model, "peft_config"):
        return blocks
    return [f"base_model.model.{name}" for name in ((blocks,) if isinstance(blocks, str) else blocks)]


def lora(bare: Any) -> Any:
    peft: Any = pytest.importorskip("peft", reason="needs peft: pip install peft")
    kinds = (nn.Linear, tf.pytorch_utils.Conv1D)
    inside = [n for n, m in bare.named_modules() if isinstance(m, kinds) and "lm_head" not in n and ".0." not in n]
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=inside, init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(bare, config).train()


@everywhere
def test_adapters_train_over_a_base_that_is_only_read(family: Family, tmp_path: Path) -> None:
    bare = lora(make(family))
    model = offloaded(bare, tmp_path, blocks=_blocks_in(bare, family.blocks))
    assert_steps_equal(bare, model, family)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    before = [p.clone() for p in frozen]
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, eps=1e-2)
    plain = torch.optim.AdamW(bare.parameters(), lr=0.01, eps=1e-2)
    advance(optimizer, plain)
    assert_equal(bare, model, exact=False)
    assert all(p.grad is None and p not in optimizer.state for p in frozen)
    assert all(torch.equal(p, q) for p, q in zip(frozen, before, strict=True))


@pytest.mark.parametrize("name", ["llama with a tied head", "t5"])
def test_generation_uses_caches(name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    bare = tf.T5ForConditionalGeneration(tf.T5Config(**T5)) if name == "t5" else family.make()
    bare.eval().config.use_cache = True
    bare.generation_config.use_cache = True
    bare.generation_config.decoder_start_token_id = 1
    model = offloaded(bare, blocks=family.blocks)
    inputs = text(0)
    expected = bare.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), expected)


def test_a_cache_with_gradients_takes_them_and_none_is_made_unasked() -> None:
    torch.manual_seed(0)
    bare = tf.LlamaModel(tf.LlamaConfig(**{**DECODER, "use_cache": True}))
    model = offloaded(bare, blocks="layers")
    assert model(**text(0)).past_key_values is None
    for each in (bare, model):
        torch.manual_seed(1)
        output = each(**text(0), use_cache=True)
        (loss_of(output) + output.past_key_values.layers[0].keys.square().sum()).backward()
    assert_equal(bare, model, exact=False)
    with torch.no_grad():
        assert model(**text(0)).past_key_values is not None
    loss_of(model(**text(0))).backward()


# --- from files -------------------------------------------------------------------------------------------------------


def loaded(path: Path, blocks: Any, **more: Any) -> Any:
    return OffloadModel.from_pretrained(path, "cpu", path / "home", blocks=blocks, checkpoint_activation=True, **more)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_of_files_is_what_from_pretrained_of_transformers_returns(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tf.Qwen3Config(**DECODER, head_dim=16, tie_word_embeddings=tied)
    tf.Qwen3ForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    bare, model = tf.Qwen3ForCausalLM.from_pretrained(tmp_path), loaded(tmp_path, "model.layers")
    assert isinstance(model, tf.Qwen3ForCausalLM)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.training == bare.training
    assert model.generation_config.to_dict() == bare.generation_config.to_dict()
    assert torch.equal(model.model.rotary_emb.inv_freq, bare.model.rotary_emb.inv_freq)
    for k in range(2):
        for each in (bare, model):
            each(**text(k), labels=text(k)["input_ids"]).loss.backward()
        assert_equal(bare, model)
    made = bare.generate(**text(0), max_new_tokens=3, do_sample=False)
    assert torch.equal(made, model.generate(**text(0), max_new_tokens=3, do_sample=False))


@pytest.mark.parametrize("name", ["bert", "clip", "vit"])
def test_names_of_older_releases_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    make(family).save_pretrained(tmp_path)  # writes the names of the release that first had the family
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for old, new in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        stored = {key.replace(old, new): value for key, value in stored.items()}
    if name == "bert":
        stored["embeddings.position_ids"] = torch.arange(512)[None]
    save_file(stored, file, {"format": "pt"})
    kind = type(family.make())
    bare = kind.from_pretrained(tmp_path)
    blocks = tf.models.vit.modeling_vit.ViTLayer if name == "vit" else family.blocks
    assert_equal(bare, loaded(tmp_path, blocks, model=kind))


def test_values_that_transformers_would_convert_are_refused_before_anything_is_stored(tmp_path: Path) -> None:
    bare = make(FAMILIES["mixtral"])
    bare.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"converts the values of layers.0.*save_original_format=False"):
        loaded(tmp_path, "layers")
    assert not (tmp_path / "home").exists()
    bare.save_pretrained(tmp_path / "converted", save_original_format=False)
    assert_equal(bare, loaded(tmp_path / "converted", "layers"))


def test_what_transformers_keeps_in_float32_is_in_float32(tmp_path: Path) -> None:
    tf.T5EncoderModel(tf.T5Config(**T5)).save_pretrained(tmp_path)
    bare = tf.T5EncoderModel.from_pretrained(tmp_path, dtype=torch.float16)
    model = loaded(tmp_path, "encoder.block", model=tf.T5EncoderModel, dtype=torch.float16)
    assert {p.dtype for p in bare.parameters()} == {torch.float16, torch.float32}
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in bare.parameters()]
    assert_equal(bare, model)
