"""Where a model that runs operation by operation spends its time, by torch's profiler.

Every operation of `kernels/` and every product runs inside a named range. A range's time is on a GPU
that of the kernels it launched, on a CPU that of its calls. Knows the groups, and nothing of steps. A
step that is replayed from a CUDA graph makes no calls, so it has no ranges.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from lookahead.models.forward_ops import OpsForward
from lookahead.models.llama import Llama
from lookahead.models.products import Product

# Modules of `kernels/` whose operations belong to a group.
GROUPS = {
    "attn_mask": "attention",
    "rms_norm": "norm",
    "rope_write": "rest",
    "silu_mul": "rest",
    "largest_logit": "head + argmax",
}
PREFIX = "lookahead: "


@contextmanager
def operation_times(model: Llama) -> Iterator[Counter[str]]:
    """Within it `model` runs with times taken; yields seconds by group, filled at its end."""
    seconds: Counter[str] = Counter()
    activities = [ProfilerActivity.CPU]
    if model.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with ExitStack() as stack:
        for module, group in GROUPS.items():
            kernel = import_module(f"lookahead.kernels.{module}")
            stack.enter_context(patch.object(kernel, "choose", _choosing(kernel.choose, group)))
        product = _ranged(Product.__call__, "products")
        logits = _ranged(OpsForward.logits, "head + argmax")
        stack.enter_context(patch.object(Product, "__call__", product))
        stack.enter_context(patch.object(OpsForward, "logits", logits))
        profiler = stack.enter_context(profile(activities=activities))
        yield seconds
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
    seconds.update(seconds_by_group(profiler.events(), model.device.type == "cuda"))


def seconds_by_group(events: Sequence[Any], is_gpu: bool) -> Counter[str]:
    """From a profile's events. Kernels of a GPU that no range launched are part of the rest."""
    seconds: Counter[str] = Counter()
    kernels = 0.0
    for event in events:
        if event.device_type != DeviceType.CPU:
            if not event.name.startswith(PREFIX):  # a range shows on the device's side too
                kernels += event.device_time_total / 1e6
        elif event.name.startswith(PREFIX) and not _has_range_above(event):
            spent = event.device_time_total if is_gpu else event.cpu_time_total
            seconds[event.name.removeprefix(PREFIX)] += spent / 1e6
    if is_gpu:
        seconds["rest"] += kernels - seconds.total()
    return seconds


def _choosing(choose: Callable[..., Any], group: str) -> Callable[..., Any]:
    """`choose`, whose answer runs in a range."""
    return lambda *arguments: _ranged(choose(*arguments), group)


def _ranged(run: Callable[..., Any], group: str) -> Callable[..., Any]:
    def ranged(*arguments: Any, **options: Any) -> Any:
        with record_function(PREFIX + group):
            return run(*arguments, **options)

    return ranged


def _has_range_above(event: Any) -> bool:
    """The head is a product too, and counts as the head."""
    while (event := event.cpu_parent) is not None:
        if event.name.startswith(PREFIX):
            return True
    return False
