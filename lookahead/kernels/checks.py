"""Argument checks shared by the public operations. Each raises ValueError with expected and got."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    like: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    """Check shape, device (that of `like`) and dtype (one of `dtypes`, else that of `like`)."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {tensor.device}")
    expected = dtypes or (like.dtype,)
    if tensor.dtype not in expected:
        raise ValueError(f"{name}: expected {' or '.join(map(str, expected))}, got {tensor.dtype}")


def check_rank(name: str, tensor: torch.Tensor, rank: int, what: str) -> None:
    """Check the number of dimensions (`what` names them) and that the tensor is floating point."""
    if tensor.dim() != rank:
        raise ValueError(f"{name}: expected {what}, got shape {list(tensor.shape)}")
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}: expected a floating-point tensor, got {tensor.dtype}")


def check_caches(
    k_cache: torch.Tensor, v_cache: torch.Tensor, rows: torch.Tensor, row_start: int
) -> None:
    """Check caches [B, num_kv_heads, C, head_dim] against a step's `rows` [B, T, heads, head_dim],
    whose keys and values stand from index `row_start` on."""
    batch, num_rows, _, head_dim = rows.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    if row_start < 0 or row_start + num_rows > capacity:
        raise ValueError(
            f"row_start: expected 0..{capacity - num_rows} for {num_rows} rows in a cache of "
            f"{capacity}, got {row_start}"
        )
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor, (batch, num_kv_heads, capacity, head_dim), rows)


def choose(implementations: Mapping[str, str], name: str) -> Callable[..., Any]:
    """The implementation of that name, a function given as "module:function"; there is no fallback.

    Modules are imported when they are asked for, since some machines cannot have all of them.
    """
    if name not in implementations:
        raise ValueError(f"implementation: expected one of {sorted(implementations)}, got {name!r}")
    return _import(implementations[name])


@cache
def _import(place: str) -> Callable[..., Any]:
    module, _, function = place.partition(":")
    try:
        return getattr(import_module(f"lookahead.kernels.{module}"), function)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"implementation: {module} needs the package {error.name}, which is not installed"
        ) from error
