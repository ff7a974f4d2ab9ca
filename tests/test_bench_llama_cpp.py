"""llama.cpp as a peer: the GGUF file that is written for it, and its ids beside the engine's."""

import json
import sys
from pathlib import Path

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from safetensors.torch import save_file
from tiny_checkpoint import edit_json, write_tiny_checkpoint

from lookahead import Engine, InputError
from lookahead.gguf_file import open_gguf, read_metadata
from lookahead.gguf_weights import find_weights, weight_values
from lookahead.models.checkpoint_config import read_model_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import decode
import peer_llama_cpp
from checkpoint_gguf import write_gguf

CPU = torch.device("cpu")


def write_checkpoint(directory: Path, **options: object) -> dict[str, torch.Tensor]:
    weights, config = random_checkpoint(5, **options)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: each.float() for name, each in weights.items()}, directory / "model.safetensors"
    )
    return weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_come_back_from_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("gguf")
    expected = write_checkpoint(tmp_path, attention_bias=True, head_dim=8)
    config = read_model_config(tmp_path)
    write_gguf(tmp_path, config, dtype, tmp_path / "out.gguf")
    reader = open_gguf(tmp_path / "out.gguf")
    fields = json.loads((tmp_path / "config.json").read_text())
    found = find_weights(fields, {tensor.name: tensor for tensor in reader.tensors})
    assert {weight.name for weight, _ in found} == set(expected)
    for weight, tensor in found:
        values = torch.tensor(weight_values(weight, tensor))
        assert torch.equal(values, expected[weight.name].to(dtype).float()), weight.name
        matrix = str(dtype).split(".")[1].replace("bfloat", "BF").replace("float", "F")
        assert tensor.tensor_type.name == ("F32" if values.dim() == 1 else matrix)
    keys = read_metadata(reader)
    assert keys["llama.attention.head_count"] == config.num_q_heads
    assert keys["llama.attention.head_count_kv"] == config.num_kv_heads
    assert keys["llama.attention.key_length"] == keys["llama.rope.dimension_count"] == 8


def test_stretched_rotary_frequencies_are_written_as_divisors(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    write_checkpoint(tmp_path, head_dim=8, rope_scaling=scaling)
    write_gguf(tmp_path, read_model_config(tmp_path), torch.float32, tmp_path / "out.gguf")
    tensors = {tensor.name: tensor for tensor in open_gguf(tmp_path / "out.gguf").tensors}
    divisors = tensors["rope_freqs.weight"].data
    # 64 / (2 pi) turns at frequency 1: more than four; at 0.1 and below: less than one, or near it.
    assert divisors[0] == 1.0
    assert divisors[2:].tolist() == pytest.approx([8.0, 8.0])


def test_a_dtype_that_gguf_has_not_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"GGUF has no torch\.float64"):
        write_gguf(tmp_path, read_model_config(tmp_path), torch.float64, tmp_path / "out.gguf")


@pytest.mark.parametrize("ends", [False, True])
def test_llama_cpp_gives_the_ids_of_the_engine(tmp_path: Path, ends: bool) -> None:
    pytest.importorskip("llama_cpp")
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", seed=4)
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    expected = engine.generate("abc abc", max_new_tokens=40, mode="autoregressive").token_ids
    if ends:  # the fifth token, wherever it comes first, is an end of text
        edit_json(checkpoint / "config.json", eos_token_id=expected[4])
        expected = expected[: expected.index(expected[4]) + 1]
    peer = peer_llama_cpp.LlamaCppPeer(
        checkpoint, read_model_config(checkpoint), torch.float32, CPU
    )
    ids = engine.tokenizer.encode("abc abc")
    for _ in range(2):  # the second run begins with an empty cache too
        run = peer.run(ids, 40)
        assert run.token_ids == expected
        assert (run.tokens, run.steps) == (len(expected) - 1, len(expected) - 1)
        assert run.seconds > 0


def test_llama_cpp_that_is_not_installed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer_llama_cpp.import_llama_cpp.cache_clear()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert decode.main(["--ckpt", str(tmp_path), "--peers", "llama-cpp"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: --peers: llama_cpp cannot be imported")
