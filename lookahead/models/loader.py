"""Safetensors checkpoint -> model: which files, which tensors, copied straight to their place.

Every tensor's name, shape and dtype is checked from the file headers before the first byte is copied.
Each is then copied from the mapped file into the preallocated parameter, so beyond the model itself no
memory is taken. Knows nothing of how the parameters are used.
"""

from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from lookahead.config import ModelConfig
from lookahead.errors import InputError, one_line
from lookahead.json_file import read_json_object
from lookahead.models.rope import inverse_frequencies
from lookahead.models.weights import LlamaWeights

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SUPPORTED_DTYPES = ("F64", "F32", "F16", "BF16")
# Buffers that older checkpoints store beside the parameters; they follow from the configuration.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"
TIED_NAME = "lm_head.weight"


def load_weights(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> LlamaWeights:
    """Load the safetensors files of a checkpoint directory, with a progress bar on a terminal.

    Raises InputError, one line naming the file or tensor, for anything missing, unexpected, misshapen,
    truncated or outside the directory.
    """
    weight_map, files = _checkpoint_files(path)
    with ExitStack() as stack:
        handles = {file: _open(stack, path / file) for file in files}
        where = _locate(path, handles, weight_map)
        # Names and shapes come first from tensors without storage: a checkpoint that does not fit is
        # refused before memory is taken.
        _check(where, handles, _plan(where, config, dtype), config)
        weights = LlamaWeights.empty(config, dtype, device)
        targets = weights.targets(config)
        num_bytes = sum(target.nbytes for target in targets.values())
        with tqdm(
            total=num_bytes, unit="B", unit_scale=True, desc="loading", disable=None, leave=False
        ) as bar:
            for name, target in targets.items():
                target.copy_(handles[where[name]].get_tensor(name))
                bar.update(target.nbytes)
    return weights


def _checkpoint_files(path: Path) -> tuple[dict[str, str] | None, list[str]]:
    """The index's tensor -> file map, None without an index, and the files to open."""
    index_file = path / INDEX_FILE
    if not index_file.exists():
        if not (path / SINGLE_FILE).exists():
            raise InputError(
                f"{path} holds no weights: expected {SINGLE_FILE} or {INDEX_FILE} with its files"
            )
        return None, [SINGLE_FILE]
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index_file}: expected an object 'weight_map' of tensor names and files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _stays_inside(file):
            raise InputError(
                f"{index_file}: tensor {name!r} points to {file!r}, expected a file in this directory"
            )
        if not _is_file(path / file):
            raise InputError(f"{index_file}: tensor {name!r} needs {file}, which is missing")
    return weight_map, sorted(set(weight_map.values()))


def _is_file(file: Path) -> bool:
    """Whether there is such a file; a name that no file can have names none."""
    try:
        return file.is_file()
    except OSError:
        return False


def _plan(
    where: dict[str, str], config: ModelConfig, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The expected tensors by name, without storage."""
    last = f"model.layers.{config.num_layers - 1}.input_layernorm.weight"
    if last not in where:
        raise InputError(
            f"tensor {last!r} is missing: config.json says num_hidden_layers {config.num_layers}, "
            "the files hold fewer"
        )
    try:
        return LlamaWeights.empty(config, dtype, torch.device("meta")).targets(config)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"config.json describes tensors that are too large: {one_line(error)}"
        ) from error


def _stays_inside(file: str) -> bool:
    """Whether a file name of an index stays in the checkpoint's directory."""
    parts = PurePosixPath(file.replace("\\", "/"))
    return (
        bool(file)
        and not parts.is_absolute()
        and not {"..", ""} & set(parts.parts)
        and ":" not in file
    )


def _open(stack: ExitStack, file: Path) -> Any:
    try:
        return stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
    except (SafetensorError, OSError, ValueError) as error:
        size = file.stat().st_size if file.is_file() else 0
        raise InputError(
            f"{file} ({size} bytes) is not a whole safetensors file, copy it again: {one_line(error)}"
        ) from error


def _locate(
    path: Path, handles: dict[str, Any], weight_map: dict[str, str] | None
) -> dict[str, str]:
    """Tensor name -> file that holds it, agreeing with the index if there is one."""
    where: dict[str, str] = {}
    for file, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118 - not a dict
            if name in where:
                raise InputError(f"{path}: tensor {name!r} is in both {where[name]} and {file}")
            if weight_map is not None and weight_map.get(name) != file:
                raise InputError(
                    f"{path / file} holds tensor {name!r}, which {INDEX_FILE} does not place there"
                )
            where[name] = file
    for name, file in (weight_map or {}).items():
        if name not in where:
            raise InputError(
                f"{path / file} lacks tensor {name!r}, which {INDEX_FILE} places there"
            )
    return where


def _check(
    where: dict[str, str],
    handles: dict[str, Any],
    targets: dict[str, torch.Tensor],
    config: ModelConfig,
) -> None:
    """Every expected tensor is there in its shape, and nothing else is."""
    for name, target in targets.items():
        if name not in where:
            raise InputError(
                f"tensor {name!r} is missing, expected shape {list(target.shape)} as config.json says"
            )
        stored = handles[where[name]].get_slice(name)
        if stored.get_shape() != list(target.shape):
            raise InputError(
                f"{where[name]}: tensor {name!r} has shape {stored.get_shape()}, expected "
                f"{list(target.shape)} as config.json says"
            )
        if stored.get_dtype() not in SUPPORTED_DTYPES:
            raise InputError(
                f"{where[name]}: tensor {name!r} has dtype {stored.get_dtype()}, expected one of "
                f"{', '.join(SUPPORTED_DTYPES)}"
            )
    for name in sorted(set(where) - set(targets)):
        if not _is_redundant(name, where, handles, config):
            raise InputError(
                f"{where[name]}: tensor {name!r} is not expected by a model as config.json says"
            )


def _is_redundant(
    name: str, where: dict[str, str], handles: dict[str, Any], config: ModelConfig
) -> bool:
    """Whether an extra tensor only repeats what the model has anyway; its values are compared."""
    stored = handles[where[name]].get_tensor(name)
    if name.endswith(DERIVED_SUFFIX):
        expected = inverse_frequencies(config.rope, config.head_dim)
        return stored.shape == expected.shape and torch.allclose(
            stored.float(), expected, rtol=1e-2 if stored.dtype != torch.float32 else 1e-5
        )
    if name == TIED_NAME and config.tie_word_embeddings:
        embedding = "model.embed_tokens.weight"
        return torch.equal(stored, handles[where[embedding]].get_tensor(embedding))
    return False
