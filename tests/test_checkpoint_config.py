"""config.json and generation_config.json: every key honoured or refused by name."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lookahead.config import ModelConfig, RopeConfig
from lookahead.errors import InputError
from lookahead.models.checkpoint_config import (
    INERT_KEYS,
    NEUTRAL_VALUES,
    parse_model_config,
    read_model_config,
)

# The shortest configuration there is; everything else has a default.
LEAST: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
THETA = {"rope_theta": 500000.0}


def parse(generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    return parse_model_config({**LEAST, **fields}, generation or {})


def test_defaults_are_those_of_the_published_configuration():
    assert parse() == ModelConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_q_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0, rope_type="default"),
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        eos_token_ids=(),
    )


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("vocab_size", 7, "vocab_size", 7),
        ("hidden_size", 128, "hidden_size", 128),
        ("intermediate_size", 5, "intermediate_size", 5),
        ("num_hidden_layers", 9, "num_layers", 9),
        ("num_attention_heads", 8, "num_q_heads", 8),
        ("num_key_value_heads", 2, "num_kv_heads", 2),
        ("num_key_value_heads", None, "num_kv_heads", 4),
        ("head_dim", 10, "head_dim", 10),
        ("head_dim", None, "head_dim", 16),
        ("max_position_embeddings", 99, "max_position_embeddings", 99),
        ("rms_norm_eps", 1e-5, "rms_norm_eps", 1e-5),
        ("rms_norm_eps", 1, "rms_norm_eps", 1.0),
        ("tie_word_embeddings", True, "tie_word_embeddings", True),
        ("attention_bias", True, "attention_bias", True),
        ("mlp_bias", True, "mlp_bias", True),
        ("mlp_bias", None, "mlp_bias", False),
        ("rope_theta", 500000, "rope", RopeConfig(theta=500000.0)),
        ("rope_theta", None, "rope", RopeConfig(theta=10000.0)),
        ("eos_token_id", 0, "eos_token_ids", (0,)),
        ("eos_token_id", [3, 99, 3], "eos_token_ids", (3, 99)),
        ("eos_token_id", None, "eos_token_ids", ()),
        ("hidden_act", "silu", "head_dim", 16),
        ("architectures", ["LlamaForCausalLM"], "head_dim", 16),
    ],
)
def test_every_key_is_honoured(key, value, field, expected):
    actual = getattr(parse(**{key: value}), field)
    assert actual == expected
    assert type(actual) is type(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_scaling": None}, RopeConfig()),
        ({"rope_scaling": {}}, RopeConfig()),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 5.0}, RopeConfig(theta=5.0)),
        ({"rope_parameters": {"rope_theta": 5.0}}, RopeConfig(theta=5.0)),
        (
            {"rope_parameters": {"rope_type": "default", **THETA}, **THETA},
            RopeConfig(theta=500000.0),
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}, RopeConfig()),
        ({"rope_scaling": LLAMA3, **THETA}, LLAMA3_ROPE),
        ({"rope_scaling": {**LLAMA3, "rope_type": None, "type": "llama3"}, **THETA}, LLAMA3_ROPE),
        ({"rope_scaling": {**LLAMA3, "type": "llama3"}, **THETA}, LLAMA3_ROPE),
        ({"rope_parameters": {**LLAMA3, **THETA}}, LLAMA3_ROPE),
        ({"rope_parameters": {**LLAMA3, **THETA}, "rope_scaling": None}, LLAMA3_ROPE),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3, **THETA}, LLAMA3_ROPE),
        # A file for readers of both spellings: the newer one also holds theta.
        ({"rope_parameters": {**LLAMA3, **THETA}, "rope_scaling": LLAMA3}, LLAMA3_ROPE),
    ],
)
def test_both_spellings_of_the_rope(fields, expected):
    assert parse(**fields).rope == expected


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, {}, (2,)),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        (2, {"eos_token_id": 7}, (7,)),
        ([2, 4], {"eos_token_id": None}, (2, 4)),
        (None, {"eos_token_id": [8]}, (8,)),
        (None, {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096}, ()),
    ],
)
def test_end_of_text_ids_of_generation_config_come_first(config, generation, expected):
    assert parse(generation, eos_token_id=config).eos_token_ids == expected


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mistral"}, 'architectures null with model_type "mistral" is not supported'),
    ({"model_type": None}, "architectures null with model_type null is not supported"),
    ({"architectures": ["LlamaModel"]}, 'architectures ["LlamaModel"] with model_type "llama"'),
    ({"architectures": ["LlamaForCausalLM", "X"]}, 'expected ["LlamaForCausalLM"] with "llama"'),
    ({"architectures": "LlamaForCausalLM"}, 'architectures "LlamaForCausalLM"'),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, expected 'silu'"),
    ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
    ({"quantization_config": {"bits": 4}}, 'quantization_config = {"bits": 4} is not supported'),
    ({"sliding_window": 4096}, "sliding_window = 4096 is not supported, expected null"),
    ({"use_sliding_window": True}, "use_sliding_window = true is not supported"),
    ({"residual_multiplier": 0.22}, "residual_multiplier = 0.22 is not supported"),
    ({"num_local_experts": 8}, "num_local_experts = 8 is not supported, expected null or 0"),
    ({"rope_interleaved": True}, "rope_interleaved = true is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ({"layer_types": ["sliding_attention"]}, "layer_types = "),
    ({"qk_norm": True}, "key 'qk_norm' is not known to this engine"),
    ({"a\nb": 1}, "key 'a\\nb' is not known"),
    ({"num_attention_heads": 6}, "hidden_size 64 is not a multiple of num_attention_heads 6"),
    (
        {"num_key_value_heads": 3},
        "num_attention_heads 4 must be a multiple of num_key_value_heads 3",
    ),
    (
        {"num_key_value_heads": 8},
        "num_attention_heads 4 must be a multiple of num_key_value_heads 8",
    ),
    ({"head_dim": 15}, "rotary embedding needs an even head_dim, got 15"),
    ({"hidden_size": 60}, "rotary embedding needs an even head_dim, got 15"),
    ({"eos_token_id": 100}, "eos_token_id 100 lies outside the vocabulary of 100 tokens"),
    ({"eos_token_id": [1, 128001]}, "eos_token_id 128001 lies outside the vocabulary"),
    *(
        ({"eos_token_id": value}, f"eos_token_id must be a token id or a list, got {value!r}")
        for value in (-1, 2.0, "2", True, [1, None], [[1]], {"id": 1})
    ),
    *(
        ({key: value}, f"{key} must be a positive whole number, got {value!r}")
        for key in ("vocab_size", "num_attention_heads", "head_dim", "max_position_embeddings")
        for value in (0, -1, 2.0, "64", True, [64])
    ),
    *(
        ({key: value}, f"{key} must be at most 2147483647, got {value!r}"[:80])
        for key in (*list(LEAST)[1:], "num_key_value_heads", "head_dim", "max_position_embeddings")
        for value in (2**31, 10**30, 10**400)
    ),
    (
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 2**31}},
        "original_max_position_embeddings must be at most 2147483647, got 2147483648",
    ),
    (
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1e300}},
        "original_max_position_embeddings must be at most 2147483647, got 1e+300",
    ),
    ({"token_healing": True}, "token_healing = true is not supported, expected null or false"),
    (
        {"cache_implementation": "quantized"},
        'cache_implementation = "quantized" is not supported, expected null or "dynamic" or "static"',
    ),
    *(
        ({key: value}, f"{key} must be a positive number, got {value!r}"[:100])
        for key in ("rms_norm_eps", "rope_theta")
        for value in (0, -1e-5, "1e-5", True, float("nan"), float("inf"), [1.0], 10**400)
    ),
    *(
        ({key: value}, f"{key} must be true or false, got {value!r}")
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")
        for value in (0, 1, 1.0, "true", [])
    ),
    *(
        ({key: {"rope_type": kind, "factor": 4.0}}, f"{key}: type {kind!r} is not supported")
        for key in ("rope_scaling", "rope_parameters")
        for kind in ("yarn", "linear", "dynamic", "longrope", "")
    ),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: type 'linear'"),
    ({"rope_scaling": {"type": ["llama3"]}}, "rope_scaling: type \"['llama3']\" is not supported"),
    ({"rope_scaling": {**LLAMA3, "type": "yarn"}}, "type 'llama3 and yarn' is not supported"),
    ({"rope_scaling": "llama3"}, "rope_scaling must be an object or null, got 'llama3'"),
    ({"rope_parameters": [LLAMA3]}, "rope_parameters must be an object or null"),
    (
        {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 32.0}},
        "rope_scaling and rope_parameters disagree",
    ),
    (
        {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}},
        "rope_parameters: rope_theta 500000.0 disagrees with rope_theta 10000.0",
    ),
    ({"rope_parameters": {"rope_theta": "5"}}, "rope_theta must be a positive number, got '5'"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling: 'factor' is not known for type 'default'"),
    ({"rope_scaling": {**LLAMA3, "beta_fast": 32}}, "'beta_fast' is not known for type 'llama3'"),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters: partial_rotary_factor other than 1 is not supported",
    ),
    *(
        (
            {"rope_scaling": {key: LLAMA3[key] for key in LLAMA3 if key != name}},
            f"{name!r} is missing",
        )
        for name in list(LLAMA3)[1:]
    ),
    *(
        (
            {"rope_scaling": {**LLAMA3, name: value}},
            f"rope_scaling: {name} must be a positive number",
        )
        for name in list(LLAMA3)[1:]
        for value in (0, -1.0, "8", None, True)
    ),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be larger"),
    (
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0.5}},
        "original_max_position_embeddings must be a positive whole number, got 0.5",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS)
def test_each_refusal_names_the_key(fields, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        parse(**fields)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [100, 10**30, [1, 100], "2", -1, True, [None]])
def test_end_of_text_ids_of_config_are_checked_even_where_they_do_not_count(value):
    with pytest.raises(InputError, match=r"^config\.json: eos_token_id ") as caught:
        parse({"eos_token_id": 2}, eos_token_id=value)
    assert len(str(caught.value)) < 200


def test_the_largest_sizes_are_read():
    assert parse(vocab_size=2**31 - 1).vocab_size == 2**31 - 1
    rope = {**LLAMA3, "original_max_position_embeddings": 2**31 - 1}
    assert parse(rope_scaling=rope).rope.original_max_position_embeddings == 2**31 - 1


@pytest.mark.parametrize("key", [key for key in LEAST if key != "model_type"])
def test_a_missing_key(key):
    config = {**LEAST, "architectures": ["LlamaForCausalLM"]}
    del config["model_type"]
    assert parse_model_config(config, {}).vocab_size == 100
    del config[key]
    with pytest.raises(InputError, match=f"{key} must be a positive whole number, got None"):
        parse_model_config(config, {})


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        (
            {"repetition_penalty": 1.1},
            "repetition_penalty = 1.1 is not supported, expected null or 1.0",
        ),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size = 3 is not supported"),
        ({"num_beams": 4}, "num_beams = 4 is not supported"),
        ({"suppress_tokens": [5]}, "suppress_tokens = [5] is not supported"),
        ({"forced_bos_token_id": 1}, "forced_bos_token_id = 1 is not supported"),
        ({"novel_decoding": 1}, "key 'novel_decoding' is not known"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list, got '</s>'"),
    ],
)
def test_refusals_in_generation_config(generation, message):
    with pytest.raises(InputError, match=re.escape(f"generation_config.json: {message}")):
        parse(generation, eos_token_id=2)
    with pytest.raises(InputError, match="eos_token_id 100 lies outside"):
        parse({"eos_token_id": [100]}, eos_token_id=2)


@pytest.mark.parametrize(
    "key", sorted(INERT_KEYS - {"architectures", "model_type", "eos_token_id"})
)
def test_an_inert_key_may_hold_anything(key):
    for value in (None, 1, {"a": [1.5]}):
        assert parse({key: value}, **{key: value}) == parse()


@pytest.mark.parametrize("key", sorted(NEUTRAL_VALUES))
def test_a_neutral_key_may_hold_its_neutral_values_only(key):
    for value in NEUTRAL_VALUES[key]:
        assert parse({key: value}, **{key: value}) == parse()
    with pytest.raises(InputError, match=f"{key} = 17.5 is not supported, expected null"):
        parse(**{key: 17.5})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"vocab_size": 1', "cannot be read as JSON"),
        (b'{"vocab_size": "\xff"}', "cannot be read as JSON"),
        (b"[" * 100000, "cannot be read as JSON"),
        (b"[{}]", "must hold a JSON object, got list"),
        (b"null", "must hold a JSON object, got NoneType"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object(tmp_path, name, text, message):
    (tmp_path / "config.json").write_text(json.dumps(LEAST))
    assert read_model_config(tmp_path) == parse()
    (tmp_path / name).write_bytes(text)
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / name} {message}")) as caught:
        read_model_config(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_directory_that_is_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match=f"no such checkpoint directory: {tmp_path / 'gone'}"):
        read_model_config(tmp_path / "gone")
    with pytest.raises(InputError, match=f"{tmp_path} is not a checkpoint: expected a directory"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match="is not a checkpoint"):
        read_model_config(tmp_path)
    with pytest.raises(InputError, match="is not a checkpoint"):
        read_model_config(Path(__file__))


# Published files in the spelling of transformers 4 that they came with: what all of them say, then
# sizes (hidden, intermediate, layers, heads, key/value heads, positions, vocabulary), the other keys
# of config.json, and generation_config.json.
SIZES = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    max_position_embeddings vocab_size""".split()
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
}
IDS = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA3_IDS = {"bos_token_id": 128000, "eos_token_id": 128001}
CHAT_IDS = {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}
NO_BIAS = {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3"}
LLAMA32 = {**LLAMA3, "factor": 32.0}
PUBLISHED: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "Llama-2-7b": (
        (4096, 11008, 32, 32, 32, 4096, 32000),
        {**IDS, "_name_or_path": "meta-llama/Llama-2-7b-hf", "torch_dtype": "float16"},
        {**IDS, **SAMPLING, "pad_token_id": 0, "max_length": 4096},
    ),
    "Llama-3.1-8B-Instruct": (
        (4096, 14336, 32, 32, 8, 131072, 128256),
        {**NO_BIAS, **CHAT_IDS, **THETA, "rope_scaling": LLAMA3},
        {**CHAT_IDS, **SAMPLING},
    ),
    "Llama-3.2-1B": (
        (2048, 8192, 16, 32, 8, 131072, 128256),
        {**NO_BIAS, **LLAMA3_IDS, **THETA, "rope_scaling": LLAMA32, "head_dim": 64}
        | {"tie_word_embeddings": True},
        {**LLAMA3_IDS, **SAMPLING, "_from_model_config": True},
    ),
    "TinyLlama-1.1B-Chat": (
        (2048, 5632, 22, 32, 4, 2048, 32000),
        {**IDS, "attention_bias": False, "rope_theta": 10000.0},
        {**IDS, "max_length": 2048, "pad_token_id": 0, "transformers_version": "4.35.0"},
    ),
    "SmolLM2-135M-Instruct": (
        (576, 1536, 30, 9, 3, 8192, 49152),
        {**NO_BIAS, **IDS, "pad_token_id": 2, "tie_word_embeddings": True, "rope_theta": 100000}
        | {"initializer_range": 0.041666666666666664, "is_llama_config": True}
        | {"rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        {**IDS, "_from_model_config": True, "pad_token_id": 2},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_in_both_spellings(name, tmp_path):
    sizes, others, generation = PUBLISHED[name]
    config = {**COMMON, **dict(zip(SIZES, sizes, strict=True)), **others}
    model = parse_model_config(config, generation)
    assert model.num_layers == config["num_hidden_layers"]
    assert model.num_kv_heads == config["num_key_value_heads"]
    assert model.head_dim == (64 if model.hidden_size <= 2048 else 128)
    assert model.rope.theta == config.get("rope_theta", 10000)
    assert model.rope.factor == (config["rope_scaling"] or {}).get("factor", 1.0)
    eos = generation["eos_token_id"]
    assert model.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))

    # transformers 5 says the same with `dtype` and `rope_parameters`
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(**copy.deepcopy(config)).save_pretrained(tmp_path)
    transformers.GenerationConfig(**generation).save_pretrained(tmp_path)
    newer = json.loads((tmp_path / "config.json").read_text())
    assert {"dtype", "rope_parameters"} <= set(newer)
    assert not {"torch_dtype", "rope_scaling", "rope_theta"} & set(newer)
    assert read_model_config(tmp_path) == model
    every_key = transformers.GenerationConfig().to_dict()
    assert parse_model_config(newer, {**every_key, **generation}) == model
