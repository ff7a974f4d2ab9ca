"""Weights: the dequantised values in the checkpoint's order, or a refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_source import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    Source,
    add_weight,
    assert_weights,
    imported,
    pair_order,
    read_json,
    read_weights,
    refusal,
    tiny_source,
    with_key,
    with_tensor,
    without,
)

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")


@pytest.fixture
def source() -> Source:
    return tiny_source()


def test_weights_are_the_dequantised_originals(source: Source, tmp_path: Path) -> None:
    q_weight = source.tensors["blk.0.attn_q.weight"][0]
    out_dir = imported(source, tmp_path)
    assert_weights(out_dir, source.expected)
    # The file's own order must not have passed: the permutation moves rows.
    as_stored = gguf.quants.dequantize(q_weight, gguf.GGMLQuantizationType.Q4_1)
    q_proj = read_weights(out_dir)["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(q_proj, torch.from_numpy(np.array(as_stored)))
    assert torch.equal(q_proj[17], torch.from_numpy(as_stored[18].copy()))  # head 1, pair 1, side 0
    assert torch.equal(q_proj[25], torch.from_numpy(as_stored[19].copy()))  # head 1, pair 1, side 1


def test_transformers_loads_it_and_agrees_exactly(source: Source, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    add_weight(
        source, "output", "lm_head", tuple(source.expected["model.embed_tokens.weight"].shape)
    )
    out_dir = imported(source, tmp_path, shard_bytes=50_000)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=source.keys["llama.vocab_size"],
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
    )
    direct = transformers.LlamaForCausalLM(config).eval()
    direct.load_state_dict(source.expected)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out_dir, dtype=torch.float32).eval()
    ids = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        logits, expected = loaded(ids).logits, direct(ids).logits
    assert torch.equal(logits, expected)
    assert expected.std() > 0.1
    # The same rows in the file's order are another model, so equal logits say something.
    q_proj = direct.model.layers[0].self_attn.q_proj.weight.data
    q_proj.copy_(q_proj[pair_order(HEADS)].clone())
    with torch.no_grad():
        assert (direct(ids).logits - expected).abs().max() > 0.01


def test_biases(source: Source, tmp_path: Path) -> None:
    for layer in range(LAYERS):
        for stem, name, rows in (
            ("attn_q", "self_attn.q_proj", HEADS * HEAD_DIM),
            ("attn_k", "self_attn.k_proj", KV_HEADS * HEAD_DIM),
            ("attn_v", "self_attn.v_proj", KV_HEADS * HEAD_DIM),
            ("attn_output", "self_attn.o_proj", HIDDEN),
            ("ffn_gate", "mlp.gate_proj", INNER),
            ("ffn_up", "mlp.up_proj", INNER),
            ("ffn_down", "mlp.down_proj", HIDDEN),
        ):
            gguf_name, name = f"blk.{layer}.{stem}", f"model.layers.{layer}.{name}"
            add_weight(source, gguf_name, name, (rows,), "bias")
    out_dir = imported(source, tmp_path)
    assert_weights(out_dir, source.expected)
    config = read_json(out_dir / "config.json")
    assert (config["attention_bias"], config["mlp_bias"]) == (True, True)
    del source.tensors["blk.1.attn_output.bias"]
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "blk.1.attn_output.bias is missing" in refusal(source.write(bare / "model.gguf"))


def test_head_size_of_its_own(source: Source, tmp_path: Path) -> None:
    """Heads need not add up to the hidden size: two query heads of 16 on a hidden size of 64."""
    source.keys |= {"llama.attention.head_count": 2, "llama.attention.key_length": HEAD_DIM}
    source.keys |= {"llama.attention.value_length": HEAD_DIM}
    for layer in range(LAYERS):
        for stem, shape in (("attn_q", (32, HIDDEN)), ("attn_output", (HIDDEN, 32))):
            data = np.arange(32 * HIDDEN, dtype=np.float32).reshape(shape)
            source.tensors[f"blk.{layer}.{stem}.weight"] = (data, "F32")
    weights = read_weights(imported(source, tmp_path))
    q_proj = weights["model.layers.0.self_attn.q_proj.weight"]
    assert (q_proj[:, 0] / HIDDEN).tolist()[:10] == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("blk.1.ffn_down.weight"), "blk.1.ffn_down.weight is missing"),
        (with_key("llama.block_count", 3), "blk.2.attn_norm.weight is missing"),
        (with_key("llama.block_count", 1), "blk.1.attn_k.weight is unexpected"),
        (with_tensor("blk.0.attn_norm.bias", (64,)), "blk.0.attn_norm.bias is unexpected"),
        (
            with_tensor("blk.0.attn_k.weight", (64, 64)),
            "blk.0.attn_k.weight has shape (64, 64), expected (32, 64)",
        ),
        (
            with_tensor("output_norm.weight", (64, 1)),
            "output_norm.weight has shape (64, 1), expected (64,)",
        ),
        (with_tensor("output_norm.weight", (64,), "F64"), "tensor type F64"),
    ],
)
def test_refusals(
    source: Source, tmp_path: Path, change: Callable[[Source], Any], message: str
) -> None:
    change(source)
    assert message in refusal(source.write(tmp_path / "model.gguf"))


def test_values_that_are_not_numbers_are_refused(source: Source, tmp_path: Path) -> None:
    source.tensors["output_norm.weight"] = (np.full(HIDDEN, np.nan, dtype=np.float32), "F32")
    message = refusal(source.write(tmp_path / "model.gguf"))
    assert "output_norm.weight holds values that are not finite" in message
