"""Decode prompts with a checkpoint and keep what was chosen at every row: `replay.py --record`."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import decode_modes
import timing
import torch
from decode_modes import Job, OutputsDiffer
from tqdm import tqdm
from trace_file import RecordedPrompt, RecordedRun, Trace, write_trace
from trace_model import Recorder, watched

from lookahead import Engine, LookaheadConfig
from lookahead.compare import first_difference
from lookahead.config import AUTOREGRESSIVE
from lookahead.devices import dtype_name
from lookahead.errors import InputError
from lookahead.layout import LookaheadLayout
from lookahead.models.checkpoint_config import read_model_config
from lookahead.tokenizer import Tokenizer


def most_rows(configs: Sequence[LookaheadConfig]) -> int:
    """Rows of the largest step."""
    sizes = [(config.window, config.ngram, config.guesses) for config in configs]
    return max(2, *(LookaheadLayout.count_rows(*size) for size in sizes))


def lengthened(jobs: Sequence[Job], least: int) -> list[Job]:
    """Each prompt with the others' ids before it, as often as it takes to have `least` of them."""
    found = []
    for number, job in enumerate(jobs):
        missing = max(least - len(job.token_ids), 0)
        others = [*jobs[number + 1 :], *jobs[:number]] or [job]
        before = [token for other in others for token in other.token_ids]
        before *= 1 + missing // len(before)
        found.append(replace(job, token_ids=before[len(before) - missing :] + job.token_ids))
    return found


def record(
    options: argparse.Namespace,
    configs: Sequence[LookaheadConfig],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Write the trace; print and return what is in it. Raises OutputsDiffer, and writes nothing, where
    a configuration's ids are not those of autoregressive decoding."""
    if options.ckpt is None:
        raise InputError("--record needs a model to record: give --ckpt")
    timing.check_writable(options.record, "--record")
    configs = [AUTOREGRESSIVE, *configs]
    config = read_model_config(options.ckpt)
    tokenizer = Tokenizer.load(options.ckpt)
    prompts = timing.read_prompts(options.prompts)
    jobs = [Job(prompt, prompt.token_ids(tokenizer)) for prompt in prompts]
    jobs = lengthened(jobs, options.prompt_tokens)[: options.limit]
    longest = max(len(job.token_ids) for job in jobs) + options.max_new_tokens
    if longest > config.max_position_embeddings:
        raise InputError(
            f"the longest prompt needs {longest} positions, the model has "
            f"{config.max_position_embeddings}"
        )
    engine = Engine.load(
        options.ckpt,
        device=str(device),
        dtype=dtype_name(dtype),
        max_length=longest,
        max_step_rows=most_rows(configs),
    )
    found = [
        _record_prompt(engine, job, configs, options.max_new_tokens)
        for job in tqdm(jobs, desc="recording", unit="prompt", leave=False, disable=None)
    ]
    source = {
        "checkpoint": options.ckpt.resolve().name,
        "prompts": options.prompts.name,
        "prompt_tokens": options.prompt_tokens,
        "max_new_tokens": options.max_new_tokens,
        "device": str(device),
        "dtype": dtype_name(dtype),
        "commit": timing.provenance(device, dtype)["commit"],
    }
    write_trace(Trace(config.vocab_size, source, found), options.record)
    size = options.record.stat().st_size
    tokens = sum(len(prompt.runs[0].token_ids) for prompt in found)
    steps = [
        sum(run.steps for run in runs) for runs in zip(*(each.runs for each in found), strict=True)
    ]
    rows = [
        [decode_modes.full_label(each), str(count), f"{tokens / count:.3f}"]
        for each, count in zip(configs, steps, strict=True)
    ]
    print(
        f"{options.record}: {len(found)} prompts, {tokens} new tokens, {size} bytes\n\n"
        f"{timing.table(['mode', 'steps', 'tokens/step'], rows)}\n"
    )
    return {"benchmark": "record", "prompts": len(found), "tokens": tokens, "steps": steps}


def _record_prompt(
    engine: Engine, job: Job, configs: Sequence[LookaheadConfig], max_new_tokens: int
) -> RecordedPrompt:
    runs: list[RecordedRun] = []
    for config in configs:
        recorder = Recorder(engine.model)
        with watched(engine.model, recorder):
            result = engine.generate(
                job.token_ids,
                max_new_tokens=max_new_tokens,
                mode="autoregressive" if config == AUTOREGRESSIVE else "lookahead",
                lookahead=config,
                trace=lambda record: (
                    None
                ),  # so that steps run one by one: the recorder looks at each
            )
        runs.append(RecordedRun(config, result.token_ids, recorder.checks, recorder.answers))
        place = first_difference(runs[0].token_ids, result.token_ids)
        if place is not None:
            raise OutputsDiffer(
                f"prompt {job.prompt.id} differs from autoregressive decoding at new token {place} "
                f"with {decode_modes.full_label(config)}"
            )
    return RecordedPrompt(job.prompt.id, job.prompt.category, job.token_ids, runs)
