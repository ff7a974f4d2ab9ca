"""Safetensors checkpoints: what is loaded into which tensor, what is refused, what it costs."""

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracles.naive_llama import random_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from lookahead.config import ModelConfig
from lookahead.errors import InputError
from lookahead.models.checkpoint_config import parse_model_config
from lookahead.models.loader import load_weights
from lookahead.models.rope import inverse_frequencies
from lookahead.models.weights import LlamaWeights

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def random_tensors(**fields: object) -> tuple[dict[str, Tensor], ModelConfig]:
    """Tensors of a tiny model by published name, float64, of values that no shorter dtype holds."""
    tensors, config = random_checkpoint(5, num_key_value_heads=2, head_dim=6, **fields)
    return {name: tensor * 1.0001 for name, tensor in tensors.items()}, parse_model_config(
        config, {}
    )


def save(tensors: dict[str, Tensor], file: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def save_sharded(tensors: dict[str, Tensor], directory: Path) -> dict[str, str]:
    """Write every other tensor to the second shard; return the index's map."""
    weight_map = {name: SHARDS[number % 2] for number, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        save(
            {name: tensors[name] for name in tensors if weight_map[name] == shard},
            directory / shard,
        )
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(directory: Path, config: ModelConfig, dtype: torch.dtype = torch.float64) -> LlamaWeights:
    return load_weights(directory, config, dtype, CPU)


def check_loaded(weights: LlamaWeights, tensors: dict[str, Tensor], config: ModelConfig) -> None:
    """Every tensor of the checkpoint is where the forward pass will read it, to the bit."""
    dtype = weights.embedding.dtype

    def expect(actual: Tensor | None, *names: str) -> None:
        assert actual.dtype == dtype
        assert torch.equal(actual.double(), torch.cat([tensors[name] for name in names]).double())

    expect(weights.embedding, EMBEDDING)
    expect(weights.norm, NORM)
    assert (weights.head is weights.embedding) == config.tie_word_embeddings
    expect(weights.head, EMBEDDING if config.tie_word_embeddings else HEAD)
    assert len(weights.layers) == config.num_layers
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        expect(layer.input_norm, f"{prefix}.input_layernorm.weight")
        expect(layer.post_attention_norm, f"{prefix}.post_attention_layernorm.weight")
        for linear, part, names, has_bias in (
            (layer.qkv, "self_attn", "qkv", config.attention_bias),
            (layer.output, "self_attn", "o", config.attention_bias),
            (layer.gate_up, "mlp", ("gate", "up"), config.mlp_bias),
            (layer.down, "mlp", ("down",), config.mlp_bias),
        ):
            stems = [f"{prefix}.{part}.{name}_proj" for name in names]
            expect(linear.weight, *(f"{stem}.weight" for stem in stems))
            assert (linear.bias is not None) == has_bias
            if has_bias:
                expect(linear.bias, *(f"{stem}.bias" for stem in stems))


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_is_in_its_place(tmp_path, fields, sharded):
    tensors, config = random_tensors(**fields)
    if sharded:
        save_sharded(tensors, tmp_path)
        save({"junk": torch.ones(3)}, tmp_path / SINGLE)  # the index rules
    else:
        save(tensors, tmp_path / SINGLE)
    check_loaded(load(tmp_path, config), tensors, config)


def test_shards_may_lie_in_a_subdirectory(tmp_path):
    tensors, config = random_tensors()
    (tmp_path / "parts").mkdir()
    weight_map = save_sharded(tensors, tmp_path / "parts")
    write_index(tmp_path, {name: f"parts/{file}" for name, file in weight_map.items()})
    check_loaded(load(tmp_path, config), tensors, config)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_every_dtype_to_every_dtype(tmp_path, stored, target):
    tensors, config = random_tensors()
    kept = {name: tensor.to(stored) for name, tensor in tensors.items()}
    save(kept, tmp_path / SINGLE)
    expected = {name: tensor.to(target) for name, tensor in kept.items()}
    check_loaded(load(tmp_path, config, target), expected, config)


def test_a_file_may_hold_several_dtypes(tmp_path):
    tensors, config = random_tensors()
    for number, name in enumerate(sorted(tensors)):
        tensors[name] = tensors[name].to(DTYPES[number % 4])
    save(tensors, tmp_path / SINGLE)
    check_loaded(load(tmp_path, config), tensors, config)


@pytest.mark.parametrize("stored", DTYPES)
def test_redundant_tensors_are_accepted_if_they_say_the_same(tmp_path, stored):
    tensors, config = random_tensors(tie_word_embeddings=True)
    tensors[EMBEDDING] = tensors[EMBEDDING].bfloat16().half().double()
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    extra = {
        HEAD: tensors[EMBEDDING].clone().to(stored),
        "model.layers.0.self_attn.rotary_emb.inv_freq": frequencies.to(stored),
        "model.layers.1.self_attn.rotary_emb.inv_freq": frequencies.clone(),
    }
    save({**tensors, **extra}, tmp_path / SINGLE)
    check_loaded(load(tmp_path, config), tensors, config)
    save_sharded({**tensors, **extra}, tmp_path)
    check_loaded(load(tmp_path, config), tensors, config)
    for name, value in extra.items():
        for wrong in (value.index_fill(0, torch.tensor([1]), 3.0), value[:-1]):
            (tmp_path / INDEX).unlink(missing_ok=True)
            save({**tensors, **extra, name: wrong}, tmp_path / SINGLE)
            refused(tmp_path, config, f"{SINGLE}: tensor {name!r} is not expected by a model")


def refused(directory: Path, config: ModelConfig, *parts: str) -> None:
    """Loading says each part, in order, in one line."""
    with pytest.raises(InputError, match=".*".join(map(re.escape, parts))) as caught:
        load(directory, config)
    assert len(str(caught.value).splitlines()) == 1


BAD_TENSORS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "missing": ({DOWN: None}, f"tensor {DOWN!r} is missing, expected shape [16, 32]"),
    "no head": ({HEAD: None}, f"tensor {HEAD!r} is missing, expected shape [11, 16]"),
    "unexpected": (
        {"model.extra": torch.ones(2)},
        "tensor 'model.extra' is not expected by a model",
    ),
    "unexpected bias": (
        {"model.layers.0.self_attn.q_proj.bias": torch.ones(24)},
        "tensor 'model.layers.0.self_attn.q_proj.bias' is not expected",
    ),
    "one layer more": (
        {"model.layers.2.input_layernorm.weight": torch.ones(16)},
        "tensor 'model.layers.2.input_layernorm.weight' is not expected",
    ),
    "transposed": ({DOWN: torch.ones(32, 16)}, "has shape [32, 16], expected [16, 32]"),
    "too long": ({NORM: torch.ones(17)}, f"tensor {NORM!r} has shape [17], expected [16]"),
    "scalar": ({NORM: torch.tensor(1.0)}, f"tensor {NORM!r} has shape [], expected [16]"),
    "integer": (
        {NORM: torch.ones(16, dtype=torch.int8)},
        f"tensor {NORM!r} has dtype I8, expected one of F64, F32, F16, BF16",
    ),
    "eight bits": (
        {DOWN: torch.ones(16, 32).to(torch.float8_e4m3fn)},
        f"tensor {DOWN!r} has dtype F8_E4M3, expected one of F64, F32, F16, BF16",
    ),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, name, sharded):
    tensors, config = random_tensors()
    changes, message = BAD_TENSORS[name]
    changed = {
        name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None
    }
    if sharded:
        weight_map = save_sharded(changed, tmp_path)
        file = weight_map.get(next(iter(changes)), "")
    else:
        save(changed, tmp_path / SINGLE)
        file = SINGLE
    refused(tmp_path, config, *([] if "missing" in message else [file]), message)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-100],
    "cut in the header": lambda content: content[:50],
    "corrupted header": lambda content: content[:8] + b"\xff" * 32 + content[40:],
    "endless header": lambda content: struct.pack("<Q", 1 << 40) + content[8:],
    "longer than its header says": lambda content: content + b"x",
    "empty": lambda content: b"",
    "pointer of a version control system": lambda content: b"version https://git-lfs.github.com\n",
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(tmp_path, damage, sharded):
    tensors, config = random_tensors()
    if sharded:
        save_sharded(tensors, tmp_path)
    else:
        save(tensors, tmp_path / SINGLE)
    file = tmp_path / (SHARDS[1] if sharded else SINGLE)
    content = DAMAGE[damage](file.read_bytes())
    file.write_bytes(content)
    refused(tmp_path, config, f"{file} ({len(content)} bytes) is not a whole safetensors file")


def test_a_directory_is_no_file(tmp_path):
    _, config = random_tensors()
    (tmp_path / SINGLE).mkdir()
    refused(tmp_path, config, f"{tmp_path / SINGLE} (0 bytes) is not a whole safetensors file")


@pytest.mark.parametrize(
    "place",
    ["../x.safetensors", "/etc/x", "a/../../x", "..\\x", "C:\\x", "C:x", "", ".", 7, None, ["x"]],
)
def test_an_index_may_not_point_elsewhere(tmp_path, place):
    tensors, config = random_tensors()
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    weight_map = save_sharded(tensors, directory)
    save(tensors, tmp_path / "x.safetensors")
    write_index(directory, {**weight_map, DOWN: place})
    expected = "is missing" if place == "." else "expected a file in this directory"
    refused(directory, config, f"{INDEX}: tensor {DOWN!r}", expected)


def test_an_index_that_disagrees_with_its_files(tmp_path):
    tensors, config = random_tensors()
    weight_map = save_sharded(tensors, tmp_path)
    other = {SHARDS[0]: SHARDS[1], SHARDS[1]: SHARDS[0]}[weight_map[DOWN]]

    write_index(tmp_path, {**weight_map, DOWN: "gone.safetensors"})
    refused(tmp_path, config, f"{INDEX}: tensor {DOWN!r} needs gone.safetensors, which is missing")
    write_index(tmp_path, {**weight_map, DOWN: other})
    refused(tmp_path, config, weight_map[DOWN], f"holds tensor {DOWN!r}, which {INDEX} does not")
    write_index(tmp_path, {name: file for name, file in weight_map.items() if name != DOWN})
    refused(tmp_path, config, weight_map[DOWN], f"holds tensor {DOWN!r}, which {INDEX} does not")
    write_index(tmp_path, {**weight_map, "model.extra": SHARDS[1]})
    refused(tmp_path, config, f"{tmp_path / SHARDS[1]} lacks tensor 'model.extra'")

    write_index(tmp_path, weight_map)
    check_loaded(load(tmp_path, config), tensors, config)
    shard = load_file(tmp_path / other)
    save({**shard, DOWN: tensors[DOWN]}, tmp_path / other)
    write_index(tmp_path, {**weight_map, DOWN: SHARDS[1]})
    refused(tmp_path, config, SHARDS[0], f"holds tensor {DOWN!r}, which {INDEX} does not")
    write_index(tmp_path, {**weight_map, DOWN: SHARDS[0]})
    refused(tmp_path, config, f"tensor {DOWN!r} is in both {SHARDS[0]} and {SHARDS[1]}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "expected an object 'weight_map' of tensor names and files"),
        ('{"weight_map": {}}', "expected an object 'weight_map'"),
        ('{"weight_map": ["model.safetensors"]}', "expected an object 'weight_map'"),
    ],
)
def test_an_index_that_is_none(tmp_path, text, message):
    tensors, config = random_tensors()
    save(tensors, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(text)
    refused(tmp_path, config, f"{tmp_path / INDEX}", message)


def test_no_weights_at_all(tmp_path):
    _, config = random_tensors()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, config, f"{tmp_path} holds no weights: expected {SINGLE} or {INDEX}")


def test_nothing_is_allocated_for_a_checkpoint_that_does_not_fit(tmp_path, monkeypatch):
    tensors, config = random_tensors()
    save({name: tensor for name, tensor in tensors.items() if name != DOWN}, tmp_path / SINGLE)
    devices = []
    allocate = LlamaWeights.empty

    def record(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
        devices.append(device.type)
        return allocate(config, dtype, device)

    monkeypatch.setattr(LlamaWeights, "empty", record)
    refused(tmp_path, config, "is missing")
    assert devices == ["meta"]


MEASURE = """
import json, sys, threading
from pathlib import Path
import torch
from lookahead.models.checkpoint_config import parse_model_config
from lookahead.models.loader import load_weights

def anonymous_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])

config = parse_model_config(json.loads(sys.argv[2]), {})
torch.ones(1000).double().bfloat16()
before, peak, done = anonymous_bytes(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous_bytes())

thread = threading.Thread(target=watch)
thread.start()
weights = load_weights(Path(sys.argv[1]), config, getattr(torch, sys.argv[3]), torch.device("cpu"))
done.set()
thread.join()
model = sum(target.nbytes for target in weights.targets(config).values())
print(json.dumps([max(peak, anonymous_bytes()) - before, model]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status, which is Linux's")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_loading_takes_the_memory_of_the_model_and_no_more(tmp_path, stored):
    fields = {
        "model_type": "llama",
        "vocab_size": 98304,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    config = parse_model_config(fields, {})
    planned = LlamaWeights.empty(config, stored, torch.device("meta")).targets(config)
    save_sharded(
        {name: torch.zeros(t.shape, dtype=stored) for name, t in planned.items()}, tmp_path
    )
    for target in ("float32", "bfloat16"):
        arguments = [str(tmp_path), json.dumps(fields), target]
        output = subprocess.run(
            [sys.executable, "-c", MEASURE, *arguments], check=True, capture_output=True, text=True
        ).stdout
        taken, model = json.loads(output)
        print(f"{stored} to {target}: {taken / model:.3f} times {model / 1e9:.2f} GB at the peak")
        assert model > 1e9
        assert taken / model <= 1.15
    for shard in SHARDS:
        (tmp_path / shard).unlink()
