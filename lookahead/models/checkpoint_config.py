"""`config.json` and `generation_config.json` of a checkpoint, read into a `ModelConfig`.

Knows the keys of the published LLaMA configuration. Each key that changes the mathematics is honoured
or refused by name; a key nobody here knows is refused too, for it might. Knows nothing of weights.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lookahead.config import MAX_COUNT, ModelConfig, RopeConfig
from lookahead.errors import InputError
from lookahead.json_file import read_json_object
from lookahead.models.checkpoint_keys import INERT_KEYS, NEUTRAL_VALUES


def read_model_config(path: Path) -> ModelConfig:
    """Read a checkpoint directory. Raises InputError for what is missing, wrong or unsupported."""
    config_file = path / "config.json"
    try:
        exists, is_checkpoint = path.exists(), config_file.is_file()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if not exists:
        raise InputError(f"no such checkpoint directory: {path}")
    if not is_checkpoint:
        raise InputError(
            f"{path} is not a checkpoint: expected a directory with config.json and safetensors files"
        )
    generation = read_json_object(path / "generation_config.json", optional=True)
    return parse_model_config(read_json_object(config_file), generation)


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Build a `ModelConfig` from the two parsed files. Raises InputError naming file and key."""
    read = _Reader("config.json", config)
    _check_architecture(config)
    vocab_size = read.count("vocab_size")
    hidden_size = read.count("hidden_size")
    num_q_heads = read.count("num_attention_heads")
    num_kv_heads = read.count("num_key_value_heads", default=num_q_heads)
    if num_q_heads % num_kv_heads:
        raise InputError(
            f"config.json: num_attention_heads {num_q_heads} must be a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    model = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=read.count("intermediate_size"),
        num_layers=read.count("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_read_head_dim(read, hidden_size, num_q_heads),
        max_position_embeddings=read.count("max_position_embeddings", default=2048),
        rms_norm_eps=read.positive("rms_norm_eps", default=1e-6),
        rope=_read_rope(read),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        attention_bias=read.flag("attention_bias"),
        mlp_bias=read.flag("mlp_bias"),
        eos_token_ids=_read_eos(config, generation, vocab_size),
    )
    hidden_act = read.get("hidden_act")
    if hidden_act not in (None, "silu"):
        raise InputError(
            f"config.json: hidden_act {hidden_act!r} is not supported, expected 'silu'"
        )
    read.refuse_the_rest()
    _Reader("generation_config.json", generation).refuse_the_rest()
    return model


class _Reader:
    """Typed access to one parsed file that remembers which keys were asked for."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values
        self.used: set[str] = set()

    def get(self, key: str) -> Any:
        self.used.add(key)
        return self.values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"{self.file}: {key} must be a positive whole number, got {repr(value)[:80]}"
            )
        _refuse_too_large(f"{self.file}: {key}", value)
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.get(key)
        return default if value is None else _positive_number(f"{self.file}: {key}", value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{self.file}: {key} must be true or false, got {value!r}")
        return bool(value)

    def refuse_the_rest(self) -> None:
        """Refuse each remaining key that changes the result or may do so."""
        for key in sorted(set(self.values) - self.used - INERT_KEYS):
            value = self.values[key]
            if key not in NEUTRAL_VALUES:
                raise InputError(
                    f"{self.file}: key {key!r} is not known to this engine and may change the result; "
                    "remove the key if it does not"
                )
            if value not in NEUTRAL_VALUES[key]:
                expected = " or ".join(json.dumps(value) for value in NEUTRAL_VALUES[key])
                raise InputError(
                    f"{self.file}: {key} = {json.dumps(value)[:80]} is not supported, "
                    f"expected {expected}"
                )


def _positive_number(what: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared rather than converted: a whole number may be too large for a float.
    if not is_number or not 0 < value <= sys.float_info.max:
        raise InputError(f"{what} must be a positive number, got {repr(value)[:80]}")
    return float(value)


def _refuse_too_large(what: str, value: float) -> None:
    if value > MAX_COUNT:
        raise InputError(f"{what} must be at most {MAX_COUNT}, got {repr(value)[:80]}")


def _check_architecture(config: Mapping[str, Any]) -> None:
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if architectures in (None, ["LlamaForCausalLM"]) and model_type == "llama":
        return
    if architectures == ["LlamaForCausalLM"] and model_type is None:
        return
    raise InputError(
        f"config.json: architectures {json.dumps(architectures)} with model_type "
        f'{json.dumps(model_type)} is not supported, expected ["LlamaForCausalLM"] with "llama"'
    )


def _read_head_dim(read: _Reader, hidden_size: int, num_q_heads: int) -> int:
    head_dim = read.count("head_dim", default=0)
    if not head_dim and hidden_size % num_q_heads:
        raise InputError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_q_heads}, and no head_dim is given"
        )
    head_dim = head_dim or hidden_size // num_q_heads
    if head_dim % 2:
        raise InputError(f"config.json: rotary embedding needs an even head_dim, got {head_dim}")
    return head_dim


def _read_rope(read: _Reader) -> RopeConfig:
    """Read the newer `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    top_theta = read.get("rope_theta")
    older, newer = read.get("rope_scaling"), read.get("rope_parameters")
    section: dict[str, Any] = {}
    for key, value in (("rope_scaling", older), ("rope_parameters", newer)):
        if value is not None and not isinstance(value, dict):
            raise InputError(f"config.json: {key} must be an object or null, got {value!r}")
        for name, setting in (value or {}).items():
            if section.setdefault(name, setting) != setting:
                raise InputError(
                    f"config.json: rope_scaling and rope_parameters disagree about {name!r}; keep one"
                )
    where = "config.json: rope_parameters" if newer else "config.json: rope_scaling"
    inner_theta = section.pop("rope_theta", None)
    if None not in (top_theta, inner_theta) and top_theta != inner_theta:
        raise InputError(
            f"{where}: rope_theta {inner_theta} disagrees with rope_theta {top_theta} above"
        )
    theta = inner_theta if top_theta is None else top_theta
    theta = 10000.0 if theta is None else _positive_number("config.json: rope_theta", theta)
    if section.pop("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"{where}: partial_rotary_factor other than 1 is not supported")
    given = [section.pop(key, None) for key in ("rope_type", "type")]
    kinds = {str(kind) for kind in given if kind is not None} or {"default"}
    kind = " and ".join(sorted(kinds))
    if kind == "default":
        _check_rope_keys(where, kind, section, ())
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise InputError(f"{where}: type {kind!r} is not supported, expected 'default' or 'llama3'")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    _check_rope_keys(where, kind, section, names)
    number = {name: _positive_number(f"{where}: {name}", section[name]) for name in names}
    if number["high_freq_factor"] <= number["low_freq_factor"]:
        raise InputError(f"{where}: high_freq_factor must be larger than low_freq_factor")
    if not number["original_max_position_embeddings"].is_integer():
        raise InputError(
            f"{where}: original_max_position_embeddings must be a positive whole number, got "
            f"{section['original_max_position_embeddings']}"
        )
    _refuse_too_large(
        f"{where}: original_max_position_embeddings", section["original_max_position_embeddings"]
    )
    return RopeConfig(
        theta=theta,
        rope_type=kind,
        factor=number["factor"],
        low_freq_factor=number["low_freq_factor"],
        high_freq_factor=number["high_freq_factor"],
        original_max_position_embeddings=int(number["original_max_position_embeddings"]),
    )


def _check_rope_keys(
    where: str, kind: str, section: Mapping[str, Any], expected: tuple[str, ...]
) -> None:
    for key in sorted(set(section) ^ set(expected)):
        state = "is not known" if key in section else "is missing"
        raise InputError(f"{where}: {key!r} {state} for type {kind!r}")


def _read_eos(
    config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """All end-of-text ids: generation_config.json's where it has them, else config.json's. Both are
    checked."""
    own = _check_eos("config.json", config.get("eos_token_id"), vocab_size)
    value = generation.get("eos_token_id")
    return own if value is None else _check_eos("generation_config.json", value, vocab_size)


def _check_eos(file: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(
                f"{file}: eos_token_id must be a token id or a list, got {repr(value)[:80]}"
            )
        if token >= vocab_size:
            raise InputError(
                f"{file}: eos_token_id {repr(token)[:80]} lies outside the vocabulary of "
                f"{vocab_size} tokens"
            )
    return tuple(dict.fromkeys(ids))
