"""GGUF import: weights, configuration and tokenizer against originals made here; every refusal."""

import copy
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lookahead.errors import InputError
from lookahead.import_gguf import import_gguf, main

gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
np = pytest.importorskip("numpy")

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
KINDS = {  # one of each type that the gguf package can quantise to
    "token_embd": "Q8_0",
    "attn_q": "Q4_1",
    "attn_k": "Q8_0",
    "attn_v": "F16",
    "attn_output": "Q4_0",
    "ffn_gate": "Q5_1",
    "ffn_up": "BF16",
    "ffn_down": "Q5_0",
}
TEXTS = [
    "In 2023, 12345.67 people didn't  come.\n\n",
    "def f(x):\n\treturn x**2  # 7\n",
    "<|im_start|>user\n你好 👩‍👩‍👧 é<|im_end|> [tool] x",
]


@dataclass
class Source:
    """A GGUF file to be: keys, tensors in GGUF order, and the checkpoint that should come out."""

    keys: dict[str, Any]
    tensors: dict[str, tuple[np.ndarray, str]]
    expected: dict[str, torch.Tensor]
    architecture: str = "llama"
    endianess: Any = gguf.GGUFEndian.LITTLE

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture, endianess=self.endianess)
        writer.data_alignment = self.keys.get("general.alignment", writer.data_alignment)
        for key, value in self.keys.items():
            add = {str: "string", bool: "bool", int: "uint32", float: "float32", list: "array"}
            getattr(writer, f"add_{add[type(value)]}")(key, value)
        for name, (data, kind) in self.tensors.items():
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The original: byte-level BPE with single digits, three special tokens and one that is not."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["people come and return 12 12 people user don't"] * 3, trainer)
    made.add_tokens([AddedToken("[tool]", special=False, normalized=False)])
    return made


def pair_order(heads: int) -> list[int]:
    """For each row of q or k in GGUF the checkpoint's row: the two of a pair side by side."""
    half = HEAD_DIM // 2
    return [
        head * HEAD_DIM + side * half + pair
        for head in range(heads)
        for pair in range(half)
        for side in (0, 1)
    ]


def tokenizer_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(tokenizer.get_vocab_size())]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    types = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "[tool]": 4}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    }


@pytest.fixture
def source(pristine: Source) -> Source:
    """A tiny model that can be imported, for a test to change."""
    return copy.deepcopy(pristine)


@pytest.fixture(scope="module")
def pristine(tokenizer: Tokenizer) -> Source:
    keys = {
        "general.type": "model",
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": tokenizer.get_vocab_size(),
        **tokenizer_keys(tokenizer),
    }
    made = Source(keys, {}, {})
    add_weight(made, "token_embd", "model.embed_tokens", (tokenizer.get_vocab_size(), HIDDEN))
    for layer in range(LAYERS):
        for stem, name, shape in (
            ("attn_norm", "input_layernorm", (HIDDEN,)),
            ("attn_q", "self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
            ("attn_k", "self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_v", "self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_output", "self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
            ("ffn_norm", "post_attention_layernorm", (HIDDEN,)),
            ("ffn_gate", "mlp.gate_proj", (INNER, HIDDEN)),
            ("ffn_up", "mlp.up_proj", (INNER, HIDDEN)),
            ("ffn_down", "mlp.down_proj", (HIDDEN, INNER)),
        ):
            add_weight(made, f"blk.{layer}.{stem}", f"model.layers.{layer}.{name}", shape)
    add_weight(made, "output_norm", "model.norm", (HIDDEN,))
    return made


def add_weight(
    made: Source, gguf_name: str, name: str, shape: tuple[int, ...], suffix: str = "weight"
) -> None:
    """Draw a weight in checkpoint order, put it in GGUF order, quantise, and expect it back."""
    stem = gguf_name.split(".")[-1]
    generator = np.random.default_rng(len(made.tensors))
    drawn = generator.standard_normal(shape).astype(np.float32) * np.float32(0.3)
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stem)
    order = list(range(shape[0])) if heads is None else pair_order(heads)
    kind = KINDS.get(stem, "F32") if suffix == "weight" else "F32"
    quantisation = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(drawn[order], quantisation)
    made.tensors[f"{gguf_name}.{suffix}"] = (stored, kind)
    exact = torch.from_numpy(np.array(gguf.quants.dequantize(stored, quantisation)))
    expected = exact.clone()
    expected[order] = exact
    made.expected[f"{name}.{suffix}"] = expected


def imported(source: Source, tmp_path: Path, shard_bytes: int = 2_000_000_000) -> Path:
    out_dir = tmp_path / "out"
    import_gguf(source.write(tmp_path / "model.gguf"), out_dir, shard_bytes)
    return out_dir


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def read_weights(out_dir: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for path in sorted(out_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            weights |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return weights


def assert_weights(out_dir: Path, expected: dict[str, torch.Tensor]) -> None:
    found = read_weights(out_dir)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32, name
        assert torch.equal(found[name], tensor), name


def refusal(path: Path) -> str:
    """Import `path`, which must fail with one line and leave the directory as it was."""
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(InputError) as caught:
        import_gguf(path, path.parent / "out")
    assert sorted(path.parent.rglob("*")) == before
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"cannot import {path}: ")
    return message


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


def test_config_files(source: Source, tmp_path: Path, tokenizer: Tokenizer) -> None:
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
        "vocab_size": tokenizer.get_vocab_size(),
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


def test_shards(source: Source, tmp_path: Path) -> None:
    add_weight(
        source, "output", "lm_head", tuple(source.expected["model.embed_tokens.weight"].shape)
    )
    out_dir = imported(source, tmp_path, shard_bytes=60_000)
    assert_weights(out_dir, source.expected)
    index = read_json(out_dir / "model.safetensors.index.json")
    assert set(index["weight_map"]) == set(source.expected)
    assert index["metadata"]["total_size"] == sum(4 * w.numel() for w in source.expected.values())
    shards = sorted(path.name for path in out_dir.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == shards
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        sizes = [
            4 * source.expected[name].numel()
            for name, holder in index["weight_map"].items()
            if holder == shard
        ]
        assert sum(sizes) <= 60_000 or len(sizes) == 1


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
    source.tensors["rope_freqs.weight"] = (np.ones(8, dtype=np.float32), "F32")
    assert read_json(imported(source, tmp_path) / "config.json")["rope_scaling"] is None


def test_tokenizer_gives_the_originals_ids(
    source: Source, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    out_dir = imported(source, tmp_path)
    found = Tokenizer.from_file(str(out_dir / "tokenizer.json"))
    assert found.get_vocab() == tokenizer.get_vocab()
    for text in TEXTS:
        expected = tokenizer.encode(text)
        assert found.encode(text).ids == expected.ids
        assert found.encode(text).tokens == expected.tokens
        assert found.decode(expected.ids, skip_special_tokens=False) == text
    assert found.encode("12345").tokens == ["1", "2", "3", "4", "5"]
    assert found.encode("<|im_start|>[tool]").ids == [1, tokenizer.token_to_id("[tool]")]
    added = found.get_added_tokens_decoder()
    special = {token_id: token.special for token_id, token in added.items()}
    assert special == {0: True, 1: True, 2: True, tokenizer.token_to_id("[tool]"): False}


def test_transformers_loads_the_tokenizer(
    source: Source, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(imported(source, tmp_path))
    assert [loaded(text).input_ids for text in TEXTS] == [tokenizer.encode(t).ids for t in TEXTS]
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 2)
    assert loaded.apply_chat_template([{"content": "hi"}], tokenize=False) == "hi\n"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "it's 1234 ok!", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġok", "!"]),
        ("gpt-2", "it's 1234 ok!", ["it", "'s", "Ġ1234", "Ġok", "!"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
        ("default", "it's 1234 a+b!", ["it", "'", "s", "Ġ", "123", "4", "Ġa", "+", "b", "!"]),
        ("llama-bpe", "IT'S 1234 ok!\n\n", ["IT", "'S", "Ġ", "123", "4", "Ġok", "!ĊĊ"]),
    ],
)
def test_pre_tokenizers(
    source: Source, tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    source.keys["tokenizer.ggml.pre"] = pre
    found = Tokenizer.from_file(str(imported(source, tmp_path) / "tokenizer.json"))
    assert [piece for piece, _ in found.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_llama_bpe_takes_whole_words_that_no_merge_makes(
    source: Source, tmp_path: Path, pre: str
) -> None:
    tokens, types = source.keys["tokenizer.ggml.tokens"], source.keys["tokenizer.ggml.token_type"]
    rare = next(i for i, kind in enumerate(types) if kind == 1 and tokens[i] == "Ī")
    source.keys["tokenizer.ggml.tokens"] = [*tokens[:rare], "Ġzq", *tokens[rare + 1 :]]
    source.keys["tokenizer.ggml.pre"] = pre
    found = Tokenizer.from_file(str(imported(source, tmp_path) / "tokenizer.json"))
    assert found.encode(" zq").tokens == (["Ġzq"] if pre == "llama-bpe" else ["Ġ", "z", "q"])


@pytest.mark.parametrize(
    ("pre", "bos", "eos", "expected"),
    [
        ("smollm", None, None, [72]),
        ("smollm", True, None, [1, 72]),
        ("smollm", True, True, [1, 72, 2]),
        ("llama-bpe", None, None, [1, 72]),
        ("llama-bpe", False, None, [72]),
    ],
)
def test_begin_and_end_tokens_are_added_as_the_file_says(
    source: Source,
    tmp_path: Path,
    tokenizer: Tokenizer,
    pre: str,
    bos: bool | None,
    eos: bool | None,
    expected: list[int],
) -> None:
    source.keys["tokenizer.ggml.pre"] = pre
    del source.keys["tokenizer.ggml.add_bos_token"]
    for name, value in (("bos", bos), ("eos", eos)):
        if value is not None:
            source.keys[f"tokenizer.ggml.add_{name}_token"] = value
    out_dir = imported(source, tmp_path)
    found = Tokenizer.from_file(str(out_dir / "tokenizer.json"))
    letter = tokenizer.id_to_token(72)
    assert found.encode(letter).ids == expected
    assert found.encode(letter, add_special_tokens=False).ids == [72]
    config = read_json(out_dir / "tokenizer_config.json")
    assert (config["add_bos_token"], config["add_eos_token"]) == (1 in expected, 2 in expected)


def without(name: str) -> Callable[[Source], Any]:
    return lambda made: (made.keys.pop(name, None), made.tensors.pop(name, None))


def with_key(name: str, value: Any) -> Callable[[Source], Any]:
    return lambda made: made.keys.update({name: value})


def with_tensor(name: str, shape: tuple[int, ...], kind: str = "F32") -> Callable[[Source], Any]:
    data = np.zeros(shape, dtype={"F32": np.float32, "F64": np.float64}[kind])
    return lambda made: made.tensors.update({name: (data, kind)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: setattr(made, "architecture", "qwen2"), "general.architecture is 'qwen2'"),
        (with_key("general.type", "adapter"), "general.type is 'adapter'"),
        (with_key("split.count", 3), "split.count"),
        (lambda made: setattr(made, "endianess", gguf.GGUFEndian.BIG), "byte order"),
        # arithmetic
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
        (with_key("llama.rope.freq_base", float("nan")), "llama.rope.freq_base is nan"),
        (with_key("llama.vocab_size", 7), "llama.vocab_size is 7"),
        (without("llama.context_length"), "llama.context_length is missing"),
        (without("llama.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon is missing"),
        # tensors
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
        # tokenizer
        (with_key("tokenizer.ggml.model", "llama"), "tokenizer.ggml.model is 'llama'"),
        (with_key("tokenizer.ggml.pre", "qwen2"), "tokenizer.ggml.pre is 'qwen2'"),
        (without("tokenizer.ggml.pre"), "tokenizer.ggml.pre is missing"),
        (without("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens is missing"),
        (without("tokenizer.ggml.merges"), "tokenizer.ggml.merges is missing"),
        (with_key("tokenizer.ggml.merges", ["zz qq"]), "tokenizer.ggml.merges cannot be used"),
        (with_key("tokenizer.ggml.merges", ["alone"]), "tokenizer.ggml.merges cannot be used"),
        (with_key("tokenizer.ggml.token_type", [1, 3]), "tokenizer.ggml.token_type 2"),
        (with_key("tokenizer.ggml.eos_token_id", 99999), "eos_token_id is 99999"),
        (
            lambda made: made.keys["tokenizer.ggml.tokens"].__setitem__(9, "<|im_end|>"),
            "different ones",
        ),
        (
            lambda made: made.keys["tokenizer.ggml.token_type"].__setitem__(9, 6),
            "tokenizer.ggml.token_type 6",
        ),
        (
            lambda made: (
                made.keys.update({"tokenizer.ggml.add_bos_token": True})
                or made.keys.pop("tokenizer.ggml.bos_token_id")
            ),
            "tokenizer.ggml.bos_token_id is missing",
        ),
    ],
)
def test_refusals(
    source: Source, tmp_path: Path, change: Callable[[Source], Any], message: str
) -> None:
    change(source)
    assert message in refusal(source.write(tmp_path / "model.gguf"))


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


def test_damaged_files(source: Source, tmp_path: Path) -> None:
    path = source.write(tmp_path / "model.gguf")
    whole = path.read_bytes()
    last = gguf.GGUFReader(path).tensors[-1]
    end = last.data_offset + last.n_bytes
    assert "begins with b''" in damaged(path, b"")
    assert "begins with b'PK" in damaged(path, b"PK\x03\x04" + whole[4:])
    for size in (4, 8, 20, 23, 500, 3000, last.data_offset - 1000, end - 1):
        assert "damaged or cut short" in damaged(path, whole[:size]), size
    assert "version 77" in damaged(path, whole[:4] + struct.pack("<I", 77) + whole[8:])
    for text in (b"attention.head_count", b"for m in messages"):  # within a key, within a value
        assert "damaged or cut short" in damaged(path, whole.replace(text, b"\xff" + text[1:]))
    info = whole.index(b"output_norm.weight") + len(b"output_norm.weight")
    for at, form, value in (
        (0, "<I", 2**32 - 1),  # number of dimensions
        (4, "<Q", 2**62),  # size
        (12, "<I", 250),  # type
        (16, "<Q", 0),  # offset: onto another tensor
        (16, "<Q", 2**63),
    ):
        data = bytearray(whole)
        struct.pack_into(form, data, info + at, value)
        assert "damaged or cut short" in damaged(path, bytes(data)), (at, value)


def damaged(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return refusal(path)


@pytest.mark.filterwarnings("error")
def test_random_damage_is_refused_or_harmless(source: Source, tmp_path: Path) -> None:
    path = source.write(tmp_path / "model.gguf")
    whole = path.read_bytes()
    header = gguf.GGUFReader(path).data_offset
    refused = 0
    for seed in range(60):
        chance = random.Random(seed)
        data = bytearray(whole)
        # Half of the hits on the keys and tensor infos, which are few bytes beside the tokens.
        start = chance.choice([0, header - 1200])
        for _ in range(2):
            data[chance.randrange(start, header)] = chance.choice([0, 1, 127, 255])
        path.write_bytes(bytes(data))
        try:
            import_gguf(path, tmp_path / str(seed))
        except InputError:
            refused += 1
            assert not (tmp_path / str(seed)).exists()
    assert refused > 20
    assert not list(tmp_path.glob(".*"))


def test_values_that_are_not_numbers_are_refused(source: Source, tmp_path: Path) -> None:
    source.tensors["output_norm.weight"] = (np.full(HIDDEN, np.nan, dtype=np.float32), "F32")
    message = refusal(source.write(tmp_path / "model.gguf"))
    assert "output_norm.weight holds values that are not finite" in message


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_failing_midway_leaves_nothing(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    import safetensors.numpy

    save_file, calls = safetensors.numpy.save_file, []

    def fail_on_second(*arguments: Any, **options: Any) -> None:
        calls.append(sorted(tmp_path.iterdir()))
        if len(calls) == 2:
            raise failure
        save_file(*arguments, **options)

    monkeypatch.setattr(safetensors.numpy, "save_file", fail_on_second)
    path = source.write(tmp_path / "model.gguf")
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else InputError
    with pytest.raises(expected) as caught:
        import_gguf(path, tmp_path / "out", shard_bytes=60_000)
    assert len(calls[1]) == 2, "it was writing somewhere"
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == [path]
    if expected is InputError:
        assert "No space left on device" in str(caught.value)


def test_disk_space_is_checked_first(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "1,000 are free" in refusal(source.write(tmp_path / "model.gguf"))


def test_out_dir(source: Source, tmp_path: Path) -> None:
    path = source.write(tmp_path / "model.gguf")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    for out_dir in (taken, path):
        with pytest.raises(InputError, match="exists and is not an empty directory"):
            import_gguf(path, out_dir)
    assert (taken / "mine.txt").read_text() == "mine"
    assert sorted(tmp_path.rglob("*")) == [path, taken, taken / "mine.txt"]
    with pytest.raises(InputError, match="cannot be written"):
        import_gguf(path, path / "below-a-file")
    empty = tmp_path / "empty"
    empty.mkdir()
    for out_dir in (empty, tmp_path / "new" / "deep"):
        import_gguf(path, out_dir)
        assert_weights(out_dir, source.expected)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=message):
            import_gguf(path, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_command_line(source: Source, tmp_path: Path) -> None:
    path, out_dir = source.write(tmp_path / "model.gguf"), tmp_path / "out"
    command = [sys.executable, "-m", "lookahead.import_gguf", str(path), str(out_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote {out_dir}\n"
    assert_weights(out_dir, source.expected)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (2, "")
    expected = f"error: {out_dir} exists and is not an empty directory; name a new one\n"
    assert again.stderr == expected


def test_command_line_without_the_gguf_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main([str(tmp_path / "model.gguf"), str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert "pip install 'lookahead[gguf]'" in output.err


def test_command_line_interrupted(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.numpy.save_file", interrupt)
    path = source.write(tmp_path / "model.gguf")
    assert main([str(path), str(tmp_path / "out")]) == 130
    assert list(tmp_path.iterdir()) == [path]
