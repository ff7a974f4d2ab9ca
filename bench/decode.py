"""Decode prompts with and without lookahead, in one run, and tell how much faster it is.

First everything runs in float32 and must give the ids of autoregressive decoding: a mode that does not
is never timed. Then all modes run in turn in the chosen dtype. One of them, "tuned", is what the engine
chooses by itself in that dtype. Every mode chooses tokens as the sampling options say, by the same
draws. `--steps-only` and `--profile` look at the engine alone: at tokens per step, and at where a
step's time goes. Progress goes to standard error, a table and a last line of JSON to standard output.
Exit codes: 0; 1 when ids differ; 2 for wrong input.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decode_figures
import decode_modes
import peers
import profile_step
import timing
import torch
from decode_modes import Job, Mode
from sampling_words import describe

from lookahead import Engine, LookaheadConfig
from lookahead.config import ModelConfig, SamplingConfig
from lookahead.devices import DTYPES, choose_device, choose_dtype, dtype_name
from lookahead.errors import InputError
from lookahead.models.checkpoint_config import read_model_config
from lookahead.sampling_options import add_sampling_options, sampling_of
from lookahead.tokenizer import Tokenizer

DEFAULT_CONFIGS = "4,3,2;15,5,15"


def build_parser() -> timing.Parser:
    """All options."""
    parser = timing.Parser(prog="bench/decode.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt", required=True, type=Path, metavar="PATH", help="checkpoint directory")
    add(
        "--prompts",
        type=Path,
        default=timing.DEFAULT_PROMPTS,
        metavar="FILE",
        help='JSON lines with "prompt", "turns" or "question"; default: 24 of our own',
    )
    add("--limit", type=timing.count, metavar="COUNT", help="only the first prompts of the file")
    add("--max-new-tokens", type=timing.count, default=128, metavar="COUNT")
    add(
        "--configs",
        default=DEFAULT_CONFIGS,
        metavar="W,N,G;...",
        help='beside the engine\'s own choice; "" for none, default %(default)s',
    )
    add_sampling_options(parser)
    add("--dtype", default="auto", metavar="|".join(("auto", *DTYPES)), help="what is timed")
    add("--device", default="auto", metavar="auto|cpu|cuda[:i]")
    add("--threads", type=timing.count, metavar="COUNT", help="threads of torch on the CPU")
    add("--repeats", type=timing.count, default=3, metavar="COUNT", help="default %(default)s")
    add("--check-limit", type=timing.count, metavar="COUNT", help="prompts compared in float32")
    add("--peers", default="", metavar="NAME,...", help=f"also time {', '.join(peers.PEERS)}")
    add(
        "--steps-only",
        action="store_true",
        help="only count tokens per step with and without prompt n-grams; nothing is timed",
    )
    add(
        "--profile",
        action="store_true",
        help="instead tell where a step's time goes: products, attention, head, host and more",
    )
    add("--json-out", type=Path, metavar="FILE", help="write the line of JSON here too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    return timing.run_main(build_parser(), _run, arguments)


@dataclass(frozen=True)
class Plan:
    """What was asked for, checked and read, before any weights are loaded."""

    ckpt: Path
    model_config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    configs: list[LookaheadConfig]
    peers: list[str]
    tokenizer: Tokenizer
    jobs: list[Job]
    max_new_tokens: int
    sampling: SamplingConfig

    def load_engine(self, dtype: torch.dtype, exact: bool = True) -> Engine:
        """An engine with just the room that these prompts and configurations need, and what it chooses
        by itself."""
        return Engine.load(
            self.ckpt,
            device=str(self.device),
            dtype=dtype_name(dtype),
            max_length=max(len(job.token_ids) for job in self.jobs) + self.max_new_tokens,
            max_step_rows=decode_modes.step_rows(self.configs),
            exact=exact,
        )

    def load_modes(self, dtype: torch.dtype, tuned: LookaheadConfig) -> list[Mode]:
        """Every mode in one dtype whose ids are to be the same, autoregressive decoding first."""
        engine = self.load_engine(dtype)
        modes = [
            decode_modes.autoregressive_mode(engine, self.sampling),
            decode_modes.tuned_mode(engine, tuned, self.sampling),
            *decode_modes.drafting_modes(engine, self.configs, self.sampling),
        ]
        for name in self.peers:
            peer = peers.PEERS[name](self.ckpt, self.model_config, dtype, self.device)
            modes.append(Mode(name, None, peer.run))
        return modes

    def show_token(self, token: int) -> str:
        return f"{token} {self.tokenizer.decode([token])!r}"


def _run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    if options.steps_only:
        record = _count_steps(plan)
    elif options.profile:
        record = _profile(plan, options.repeats)
    else:
        try:
            record = _time(plan, options.check_limit, options.repeats)
        except decode_modes.OutputsDiffer as difference:
            print(f"refused: {difference}; no speed is reported", file=sys.stderr)
            return 1
    record["provenance"] = timing.provenance(plan.device, plan.dtype, options.prompts)
    timing.publish(record, options.json_out)
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    """Check everything that can be checked without the weights."""
    configs = decode_modes.parse_configs(options.configs, may_be_empty=True)
    sampling = sampling_of(options)
    peer_names = peers.parse_peers(options.peers, sampling)
    if options.steps_only and options.profile:
        raise InputError("--steps-only times nothing: leave it or --profile out")
    if options.steps_only and not configs:
        raise InputError("--steps-only counts the steps of --configs: give at least one W,N,G")
    if peer_names and (options.steps_only or options.profile):
        option = "--steps-only" if options.steps_only else "--profile"
        raise InputError(f"{option} looks at the engine's own steps: leave out --peers")
    prompts = timing.read_prompts(options.prompts, options.limit)
    timing.check_writable(options.json_out)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    model_config = read_model_config(options.ckpt)
    tokenizer = Tokenizer.load(options.ckpt)
    jobs = [Job(prompt, prompt.token_ids(tokenizer)) for prompt in prompts]
    most = model_config.max_position_embeddings - options.max_new_tokens
    for job in jobs:
        if not 1 <= len(job.token_ids) <= most:
            raise InputError(
                f"prompt {job.prompt.id} has {len(job.token_ids)} tokens, expected 1..{most} with "
                f"{options.max_new_tokens} new tokens in this model's context"
            )
    return Plan(
        ckpt=options.ckpt,
        model_config=model_config,
        device=device,
        dtype=dtype,
        configs=configs,
        peers=peer_names,
        tokenizer=tokenizer,
        jobs=jobs,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
    )


def _time(plan: Plan, check_limit: int | None, repeats: int) -> dict[str, Any]:
    """Check in float32, then time in the plan's dtype. Raises OutputsDiffer."""
    checked = plan.jobs[:check_limit]
    tuning = plan.load_engine(plan.dtype).tuning  # what is checked is what will be timed
    accepted = decode_modes.check_modes(
        plan.load_modes(torch.float32, tuning.config), checked, plan.max_new_tokens, plan.show_token
    )
    modes = plan.load_modes(plan.dtype, tuning.config)
    if plan.device.type == "cuda":  # on a CPU exactness costs nothing
        inexact = plan.load_engine(plan.dtype, exact=False)
        modes.insert(1, decode_modes.autoregressive_mode(inexact, plan.sampling))
        accepted.insert(1, decode_modes.AcceptedTokens())
    runs = decode_modes.time_modes(modes, plan.jobs, plan.max_new_tokens, repeats)
    if plan.dtype == torch.float32:
        decode_modes.require_same_runs(modes, plan.jobs, runs, plan.show_token)
    rows = decode_figures.timed_rows(modes, plan.jobs, runs, accepted)
    dtype = dtype_name(plan.dtype)
    print(
        f"float32: all modes that are exact give the same ids on all {len(checked)} prompts compared\n"
        f"timed: {dtype} on {plan.device}, {torch.get_num_threads()} threads, {len(plan.jobs)} prompts "
        f"x {repeats}, at most {plan.max_new_tokens} new tokens, {describe(plan.sampling)}\n\n"
        f"{decode_figures.timed_table(rows)}\n\n"
        f"{decode_figures.time_line(rows)}\n"
        f"tuned is what the engine chooses by itself: {tuning.reason}\n"
        "rows/step: rows that were run, the current token's included\n"
        "x AR: a prompt's tokens/s over those of the faster autoregressive mode, median of prompts\n"
        f"same ids: prompts whose ids in {dtype} are those of autoregressive decoding\n"
        "prompt, window, output: tokens accepted in the float32 runs, by where their n-gram came from\n"
    )
    return {
        "benchmark": "decode",
        **_request(plan),
        "repeats": repeats,
        "check": {"dtype": "float32", "prompts": len(checked), "identical": True},
        "choice": tuning.reason,
        "rows": rows,
    }


def _count_steps(plan: Plan) -> dict[str, Any]:
    """Tokens per step with and without prompt n-grams, in the plan's dtype."""
    modes = decode_modes.window_modes(plan.load_engine(plan.dtype), plan.configs, plan.sampling)
    runs, accepted = decode_modes.count_steps(modes, plan.jobs, plan.max_new_tokens)
    rows = decode_figures.step_rows(modes, plan.jobs, runs, accepted)
    print(
        f"{dtype_name(plan.dtype)} on {plan.device}, {len(plan.jobs)} prompts, at most "
        f"{plan.max_new_tokens} new tokens, {describe(plan.sampling)}; nothing was timed\n\n"
        f"{decode_figures.steps_table(rows)}\n"
    )
    return {"benchmark": "decode_steps", **_request(plan), "rows": rows}


def _profile(plan: Plan, repeats: int) -> dict[str, Any]:
    """Where a step's time goes, in the plan's dtype."""
    engine = plan.load_engine(plan.dtype)
    configs = [engine.tuning.config, *plan.configs]
    rows = profile_step.measure(
        engine, configs, plan.jobs, plan.max_new_tokens, repeats, plan.sampling
    )
    print(
        f"{dtype_name(plan.dtype)} on {plan.device}, {engine.model.implementation}, "
        f"{torch.get_num_threads()} threads, {len(plan.jobs)} prompts x {repeats}, at most "
        f"{plan.max_new_tokens} new tokens, {describe(plan.sampling)}\n\n"
        f"{profile_step.table(rows)}\n\n"
        "rows, length: means of live rows and of committed tokens; ms/step: without clocks\n"
        "rest: rotation, SiLU, embedding; host: what is left of a step, draws included\n"
        "with several threads a part ends when the last of them is done with it; what a thread reads "
        "ahead of the next weights counts to the part in which it does so\n"
    )
    implementation = engine.model.implementation
    return {
        "benchmark": "profile",
        **_request(plan),
        "repeats": repeats,
        "implementation": implementation,
        "rows": rows,
    }


def _request(plan: Plan) -> dict[str, Any]:
    templated = plan.tokenizer.has_chat_template
    return {
        "checkpoint": plan.ckpt.resolve().name,
        "prompts": len(plan.jobs),
        "chat_prompts": sum(job.prompt.is_chat and templated for job in plan.jobs),
        "max_new_tokens": plan.max_new_tokens,
        "sampling": describe(plan.sampling),
    }


if __name__ == "__main__":
    sys.exit(main())
