"""What a replayed step is made of: its share of the memory's speed, and how many launches it takes.

The memory's speed is that of copying a large tensor, measured here; a step of autoregressive decoding
cannot be faster than its weights and its cache can be read. Launches are counted on a GPU only.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import memory
import timing
import torch
from decode_modes import Job, Mode
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lookahead.config import ModelConfig

COPIES = 7
COPIED_BYTES = {"cuda": 2**31, "cpu": 2**27}
# Launches of a step are those of the steps between these numbers of new tokens.
FEW_TOKENS, MORE_TOKENS = 4, 24


def measure(
    modes: Sequence[Mode],
    jobs: Sequence[Job],
    rows: Sequence[dict[str, Any]],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Figures for the timed `rows` of these modes; launches are those on the first prompt."""
    speed = copy_speed(device)
    lengths = [
        len(job.token_ids) + prompt["new_tokens"] / 2
        for job, prompt in zip(jobs, rows[0]["prompts"], strict=True)
    ]
    step_bytes = read_bytes(config, dtype, int(fmean(lengths)))
    plain = [row for mode, row in zip(modes, rows, strict=True) if mode.is_autoregressive]
    fastest = min(row["ms_per_step"]["median"] for row in plain)
    return {
        "copy_bytes_per_second": speed,
        "step_bytes": step_bytes,
        "autoregressive_ms": fastest,
        "share_of_copy_speed": step_bytes / (fastest / 1000) / speed,
        "launches": [
            {"mode": str(mode), **launches(mode, jobs[0], config.num_layers, device)}
            for mode in modes
        ]
        if device.type == "cuda"
        else None,
    }


def read_bytes(config: ModelConfig, dtype: torch.dtype, length: int) -> int:
    """What one row reads: weights, but of an embedding that is not the head too one row at most, and
    the keys and values of `length` tokens."""
    weights = memory.weight_bytes(config, dtype)
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size * dtype.itemsize
    return weights + memory.cache_bytes(config, dtype, length)


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.zeros(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    seconds = [timing.time_call(lambda: target.copy_(source), device)[1] for _ in range(COPIES)]
    return 2 * source.nbytes / timing.spread(seconds).median


def launches(mode: Mode, job: Job, num_layers: int, device: torch.device) -> dict[str, Any]:
    """Kernels that a step runs, in all and by layer, and calls of the host that start them: fewer,
    where a graph is replayed. None where the recording is too short to tell."""
    mode.run(job.token_ids, FEW_TOKENS, None)  # what is compiled or recorded, is so now
    counts = []
    for tokens in (FEW_TOKENS, MORE_TOKENS):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run = mode.run(job.token_ids, tokens, None)
            torch.cuda.synchronize(device)
        counts.append((run.steps, *count_launches(profiler.events())))
    steps, kernels, calls = (more - few for few, more in zip(*counts, strict=True))
    if not steps:
        return {"kernels": None, "kernels_per_layer": None, "calls": None}
    return {
        "kernels": kernels / steps,
        "kernels_per_layer": kernels / steps / num_layers,
        "calls": calls / steps,
    }


def count_launches(events: Sequence[Any]) -> tuple[int, int]:
    """Kernels on the device, and calls that launch kernels or graphs of them."""
    kernels = sum(
        event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        for event in events
    )
    calls = sum(
        event.device_type == DeviceType.CPU
        and ("LaunchKernel" in event.name or "GraphLaunch" in event.name)
        for event in events
    )
    return kernels, calls


def table(cost: dict[str, Any]) -> str:
    """In words."""
    lines = [
        f"copying: {cost['copy_bytes_per_second'] / 1e9:.0f} GB/s; one row reads "
        f"{cost['step_bytes'] / 1e9:.3f} GB: {100 * cost['share_of_copy_speed']:.0f}% of that speed "
        f"in {cost['autoregressive_ms']:.2f} ms"
    ]
    if cost["launches"] is None:
        lines.append("launches are counted on a GPU only")
    else:
        lines += [
            f"{each['mode']}: {each['kernels']:.0f} kernels a step, {each['kernels_per_layer']:.1f} a "
            f"layer, {each['calls']:.0f} calls"
            for each in cost["launches"]
            if each["kernels"] is not None
        ]
    return "\n".join(lines)
