"""GGUF files of a tiny model, and what importing them should give."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lookahead.errors import InputError
from lookahead.import_gguf import import_gguf

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


@cache
def tiny_tokenizer() -> Tokenizer:
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


def tiny_source() -> Source:
    """A tiny model that can be imported, for a test to change."""
    return copy.deepcopy(_pristine())


@cache
def _pristine() -> Source:
    tokenizer = tiny_tokenizer()
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


def without(name: str) -> Callable[[Source], Any]:
    return lambda made: (made.keys.pop(name, None), made.tensors.pop(name, None))


def with_key(name: str, value: Any) -> Callable[[Source], Any]:
    return lambda made: made.keys.update({name: value})


def with_tensor(name: str, shape: tuple[int, ...], kind: str = "F32") -> Callable[[Source], Any]:
    data = np.zeros(shape, dtype={"F32": np.float32, "F64": np.float64}[kind])
    return lambda made: made.tensors.update({name: (data, kind)})
