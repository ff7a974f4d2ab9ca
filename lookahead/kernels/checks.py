"""Argument checks shared by the public operations. Each raises ValueError with expected and got."""

from collections.abc import Mapping
from typing import TypeVar

import torch

Function = TypeVar("Function")

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


def choose(implementations: Mapping[str, Function], name: str) -> Function:
    """The implementation of that name; there is no fallback to another."""
    if name not in implementations:
        raise ValueError(f"implementation: expected one of {sorted(implementations)}, got {name!r}")
    return implementations[name]
