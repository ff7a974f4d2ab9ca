"""The model's keys: what they become, and which are refused."""

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
    assert_weights,
    imported,
    read_json,
    refusal,
    tiny_source,
    tiny_tokenizer,
    with_key,
    without,
)

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")


@pytest.fixture
def source() -> Source:
    return tiny_source()


def test_config_files(source: Source, tmp_path: Path) -> None:
    source.keys["tokenizer.ggml.eot_token_id"] = 0
    source.keys["tokenizer.ggml.eom_token_id"] = 2
    out_dir = imported(source, tmp_path)
    assert read_json(out_dir / "config.json") == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": tiny_tokenizer().get_vocab_size(),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    generation = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    assert read_json(out_dir / "generation_config.json") == generation
    assert read_json(out_dir / "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    }
    modes = {path.stat().st_mode for path in out_dir.iterdir()}
    assert len(modes) == 1, "all files are as readable as any"
    assert len(list(out_dir.iterdir())) == 5


def test_defaults_of_absent_keys(source: Source, tmp_path: Path) -> None:
    for key in ("rope.freq_base", "rope.dimension_count", "vocab_size"):
        del source.keys[f"llama.{key}"]
    for name in ("bos", "eos", "unknown", "padding"):
        del source.keys[f"tokenizer.ggml.{name}_token_id"]
    out_dir = imported(source, tmp_path)
    config = read_json(out_dir / "config.json")
    assert (config["rope_theta"], config["head_dim"]) == (10000.0, HEAD_DIM)
    assert config["eos_token_id"] is None
    assert read_json(out_dir / "generation_config.json")["eos_token_id"] is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "none"),
        ("llama.rope.scaling.factor", 1.0),
        ("llama.rope.scaling.finetuned", False),
        ("llama.expert_count", 0),
        ("llama.attention.key_length", HEAD_DIM),
        ("llama.attention.value_length", HEAD_DIM),
        ("general.type", "model"),
        ("general.alignment", 64),
    ],
)
def test_keys_that_change_nothing_pass(
    source: Source, tmp_path: Path, key: str, value: Any
) -> None:
    source.keys[key] = value
    out_dir = imported(source, tmp_path)
    assert_weights(out_dir, source.expected)
    assert read_json(out_dir / "config.json")["head_dim"] == HEAD_DIM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: setattr(made, "architecture", "qwen2"), "general.architecture is 'qwen2'"),
        (with_key("general.type", "adapter"), "general.type is 'adapter'"),
        (with_key("split.count", 3), "split.count"),
        (lambda made: setattr(made, "endianess", gguf.GGUFEndian.BIG), "byte order"),
        (with_key("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.type is 'yarn'"),
        (with_key("llama.rope.scaling.type", "linear"), "llama.rope.scaling.type is 'linear'"),
        (with_key("llama.rope.scaling.factor", 4.0), "llama.rope.scaling.factor is 4.0"),
        (with_key("llama.rope.scale_linear", 2.0), "llama.rope.scale_linear is 2.0"),
        (with_key("llama.rope.scaling.attn_factor", 1.5), "rope.scaling.attn_factor is 1.5"),
        (
            with_key("llama.rope.dimension_count", 8),
            "dimension_count is 8, expected the head size 16",
        ),
        (
            with_key("llama.attention.value_length", 8),
            "value_length is 8, expected the head size 16",
        ),
        (with_key("llama.expert_count", 8), "llama.expert_count is 8"),
        (with_key("llama.attention.sliding_window", 4096), "attention.sliding_window is 4096"),
        (with_key("llama.attention.causal", False), "llama.attention.causal is False"),
        (with_key("llama.attention.scale", 0.5), "llama.attention.scale is 0.5"),
        (with_key("llama.logit_scale", 2.0), "llama.logit_scale is 2.0"),
        (with_key("llama.unheard_of", 1), "llama.unheard_of is 1"),
        (with_key("llama.two\nlines", 1), "llama.two?lines is 1"),
        (with_key("llama.attention.head_count", [4, 4]), "attention.head_count is [4, 4]"),
        (with_key("llama.attention.head_count_kv", 3), "head_count_kv 3"),
        (with_key("llama.block_count", 0), "llama.block_count is 0"),
        (with_key("llama.context_length", 2**31), "context_length is 2147483648, expected a whole"),
        (with_key("llama.rope.freq_base", float("nan")), "llama.rope.freq_base is nan"),
        (with_key("llama.vocab_size", 7), "llama.vocab_size is 7"),
        (without("llama.context_length"), "llama.context_length is missing"),
        (without("llama.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon is missing"),
    ],
)
def test_refusals(
    source: Source, tmp_path: Path, change: Callable[[Source], Any], message: str
) -> None:
    change(source)
    assert message in refusal(source.write(tmp_path / "model.gguf"))


def llama3_factors(factor: float, high: float = 4.0) -> np.ndarray:
    """What an independent implementation divides each frequency by."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        head_dim=HEAD_DIM, rope_theta=500000.0, rope_scaling=scaling, max_position_embeddings=131072
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    return (plain / scaled).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_are_recovered(source: Source, tmp_path: Path, factor: float) -> None:
    factors = llama3_factors(factor)
    assert 1 == factors[0] < factors[4] < factor, "the factors in between must be among them"
    factors[factors > 0.999 * factor] = factor
    source.keys["llama.rope.freq_base"] = 500000.0
    source.tensors["rope_freqs.weight"] = (factors, "F32")
    out_dir = imported(source, tmp_path)
    assert read_json(out_dir / "config.json")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert_weights(out_dir, source.expected)


def test_other_rope_factors_are_refused(source: Source, tmp_path: Path) -> None:
    source.keys["llama.rope.freq_base"] = 500000.0
    for factors in (llama3_factors(8.0, high=4.1), llama3_factors(8.0)[:-1], np.full(8, 0.5)):
        source.tensors["rope_freqs.weight"] = (factors.astype(np.float32), "F32")
        assert "rope_freqs.weight" in refusal(source.write(tmp_path / "model.gguf"))
    for wrong in (np.inf, -np.inf, np.nan, 0.0, 3e38):
        for place in ([0], [7], range(8)):
            factors = llama3_factors(8.0).astype(np.float32)
            factors[list(place)] = wrong
            source.tensors["rope_freqs.weight"] = (factors, "F32")
            assert "rope_freqs.weight" in refusal(source.write(tmp_path / "model.gguf"))
    source.tensors["rope_freqs.weight"] = (np.ones(8, dtype=np.float32), "F32")
    assert read_json(imported(source, tmp_path) / "config.json")["rope_scaling"] is None
