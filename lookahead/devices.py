"""Where and in what precision a model runs: names from the user to torch's devices and dtypes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from lookahead.config import DTYPE_NAMES
from lookahead.errors import InputError

IMPLEMENTATIONS = ("torch", "triton", "numba")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def choose_device(name: str) -> torch.device:
    """ "auto" is the first CUDA device, or the CPU where there is none. Raises InputError for a device
    that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (":" in name and not index.isdecimal()):
        raise InputError(f"device {name!r} is not known, expected auto, cpu, cuda or cuda:INDEX")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise InputError(
            f"device {name!r} is not there: this machine has {count} CUDA devices; use auto or cpu"
        )
    return torch.device("cuda", int(index or 0))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is what the device computes fast: bfloat16, or where it has no instructions for that
    float16 on a GPU and float32 on a CPU. Raises InputError for an unknown name."""
    if name != "auto":
        if name not in DTYPES:
            raise InputError(f"dtype {name!r} is not known, expected auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32


def _cpu_has_bfloat16() -> bool:
    """Whether an x86 CPU multiplies bfloat16 in hardware; no, where torch is too old to tell."""
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16"))


@contextmanager
def refuse_out_of_memory(what: str, device: torch.device) -> Iterator[None]:
    """Turn torch's failure to get memory for `what` into an InputError."""
    try:
        yield
    except RuntimeError as error:
        # On a CPU, and for sizes that nothing could count, only its words tell what went wrong.
        words = ("allocate memory", "size calculation overflowed", "too large")
        if not isinstance(error, torch.OutOfMemoryError) and not any(
            word in str(error) for word in words
        ):
            raise
        raise InputError(
            f"{what} does not fit into the memory of {device}; take a shorter max_length, a smaller "
            "dtype or another device"
        ) from error


def choose_implementation(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Which implementation of the operations runs: "auto" is Triton's on a GPU, but for float64, which
    it does not have, and Numba's on a CPU. Raises InputError for one that cannot run there."""
    if name == "auto":
        on_gpu = "torch" if dtype == torch.float64 else "triton"
        name = on_gpu if device.type == "cuda" else "numba"
    if name not in IMPLEMENTATIONS:
        expected = f"auto, {', '.join(IMPLEMENTATIONS[:-1])} or {IMPLEMENTATIONS[-1]}"
        raise InputError(f"implementation {name!r} is not known, expected {expected}")
    if name == "triton" and dtype == torch.float64:
        raise InputError("implementation triton has no float64: take float32, or torch")
    if name == "numba" and device.type != "cpu":
        raise InputError(f"implementation numba runs on a CPU only, not on {device}: take triton")
    if name != "torch" and find_spec(name) is None:
        raise InputError(
            f"implementation {name} needs the package {name}, which is not installed: "
            "install it where it exists, or take torch"
        )
    return name


def dtype_name(dtype: torch.dtype) -> str:
    """The user's name of a dtype."""
    return next(name for name, value in DTYPES.items() if value == dtype)
