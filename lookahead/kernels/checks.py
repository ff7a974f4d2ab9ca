"""Argument checks shared by the public operations. Each raises ValueError with expected and got."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of this dtype are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    like: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    """Check shape, device (that of `like`) and dtype (one of `dtypes`, else that of `like`)."""
    _check_kind(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {tensor.device}")
    expected = dtypes or (like.dtype,)
    if tensor.dtype not in expected:
        raise ValueError(f"{name}: expected {' or '.join(map(str, expected))}, got {tensor.dtype}")


def check_floating(name: str, tensor: torch.Tensor, what: str, rank: int | None = None) -> None:
    """Check for a floating-point tensor that holds elements, of `rank` dimensions or at least one
    (`what` names them)."""
    _check_kind(name, tensor)
    if tensor.dim() == 0 if rank is None else tensor.dim() != rank:
        raise ValueError(f"{name}: expected {what}, got shape {list(tensor.shape)}")
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}: expected a floating-point tensor, got {tensor.dtype}")
    if tensor.numel() == 0 or tensor.device.type == "meta":
        raise ValueError(
            f"{name}: expected a tensor that holds elements, got shape {list(tensor.shape)} on "
            f"{tensor.device}"
        )


def _check_kind(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")


def check_caches(
    k_cache: torch.Tensor, v_cache: torch.Tensor, rows: torch.Tensor, row_start: int
) -> None:
    """Check caches [B, num_kv_heads, C, head_dim] against a step's `rows` [B, T, heads, head_dim],
    whose keys and values stand from index `row_start` on."""
    batch, num_rows, _, head_dim = rows.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    if capacity < num_rows:
        raise ValueError(f"k_cache: expected room for {num_rows} rows, got {capacity}")
    if type(row_start) is not int or not 0 <= row_start <= capacity - num_rows:
        raise ValueError(
            f"row_start: expected 0..{capacity - num_rows} for {num_rows} rows in a cache of "
            f"{capacity}, got {row_start!r:.80}"
        )
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor, (batch, num_kv_heads, capacity, head_dim), rows)


def check_numbers(name: str, numbers: torch.Tensor, least: int, most: int) -> None:
    """Check the numbers of an int tensor on a CPU; elsewhere a look would make the host wait."""
    if numbers.device.type == "cpu" and numbers.numel():
        low, high = (int(number) for number in torch.aminmax(numbers))
        if low < least or high > most:
            raise ValueError(f"{name}: expected {least}..{most}, got {numbers.tolist()!s:.200}")


def check_contiguous(**tensors: torch.Tensor) -> None:
    """Check tensors that a compiled function is given by address."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def check_launch(**tensors: torch.Tensor) -> None:
    """Check tensors that a Triton kernel is given by address: contiguous, of a dtype that it computes
    in, and on a device where it runs."""
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float64:
            raise ValueError(f"{name}: expected float16, bfloat16 or float32, got {tensor.dtype}")
        check_contiguous(**{name: tensor})
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: expected no gradient to be asked for, the kernel has none")
        check_can_run("triton", tensor.device, tensor.dtype)


def check_can_run(implementation: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse Triton's kernels on a CPU but in its interpreter, and there bfloat16; Numba's elsewhere,
    and float16 on a processor without instructions for it."""
    if implementation == "numba":
        if device.type != "cpu":
            raise ValueError(f"implementation: expected torch or triton on {device}, got numba")
        if dtype == torch.float16 and not _import_from("lookahead.kernels.tile", "HAS_FLOAT16"):
            raise ValueError(
                "implementation: expected torch for float16 on this processor, which has no "
                "instructions for it (F16C), got numba; or take another dtype"
            )
    if implementation != "triton" or device.type != "cpu":
        return
    kernel = _import_from("lookahead.kernels.silu_mul_triton", "gate_rows")
    if isinstance(kernel, _import_from("triton.runtime", "JITFunction")):
        raise ValueError(
            "implementation: expected torch on a CPU, got triton, which runs there only in its "
            "interpreter (TRITON_INTERPRET=1)"
        )
    if dtype == torch.bfloat16:
        raise ValueError(
            "implementation: expected float16 or float32 for triton on a CPU, got bfloat16, which its "
            "interpreter computes wrongly"
        )


def choose(implementations: Mapping[str, str], name: str) -> Callable[..., Any]:
    """The implementation of that name, a function given as "module:function"; there is no fallback.

    Modules are imported when they are asked for, since some machines cannot have all of them.
    """
    if not isinstance(name, str) or name not in implementations:
        raise ValueError(f"implementation: expected one of {sorted(implementations)}, got {name!r}")
    module, _, function = implementations[name].partition(":")
    return _import_from(f"lookahead.kernels.{module}", function)


@cache
def _import_from(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"implementation: {module} needs the package {error.name}, which is not installed"
        ) from error
