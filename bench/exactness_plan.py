"""What `exactness.py` can be asked for, and what it came to: checked, before any weights are loaded."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import timing  # first, for it says in one line that the package cannot be imported

# isort: split
import decode_modes
import exactness_cost
import peers
import torch
from batch import parse_batches
from decode_modes import Job

from lookahead import Engine, LookaheadConfig
from lookahead.config import SamplingConfig, check_whole
from lookahead.devices import choose_device, choose_dtype, dtype_name
from lookahead.errors import InputError
from lookahead.layout import LookaheadLayout
from lookahead.models.checkpoint_config import read_model_config
from lookahead.sampling_options import add_sampling_options, sampling_of
from lookahead.tokenizer import Tokenizer


def build_parser(description: str | None) -> timing.Parser:
    """All options."""
    parser = timing.Parser(prog="bench/exactness.py", description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt", type=Path, required=True, metavar="PATH", help="checkpoint directory")
    add(
        "--prompts",
        type=Path,
        nargs="+",
        default=[timing.DEFAULT_PROMPTS],
        metavar="FILE",
        help="JSON lines with prompt, turns or question; default: the prompts beside this file",
    )
    add("--limit", type=timing.count, metavar="COUNT", help="only the first prompts of each file")
    add(
        "--least-tokens",
        type=timing.count,
        default=1,
        metavar="COUNT",
        help="leave out shorter ones",
    )
    add("--most-tokens", type=timing.count, metavar="COUNT", help="leave out longer ones")
    add("--configs", default="5,4,5;15,5,15", metavar="W,N,G;...", help="default %(default)s")
    add(
        "--batches",
        default="1",
        metavar="B,B,...",
        help="run each configuration with so many prompts at a time; default %(default)s",
    )
    add(
        "--logprobs",
        type=int,
        metavar="K",
        help="compare log-probabilities too, each token's and those of the K most probable ones",
    )
    add("--max-new-tokens", type=timing.count, default=128, metavar="COUNT")
    add_sampling_options(parser)
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--threads", type=timing.count, metavar="COUNT")
    add("--peers", default="", metavar="NAME", help="transformers, or nothing (default)")
    add("--resume", type=Path, metavar="FILE", help="JSON lines of finished prompts")
    add("--cost", action="store_true", help="only compare step times with and without exactness")
    add("--json-out", type=Path, metavar="FILE", help="write the line of JSON here too")
    return parser


@dataclass(frozen=True)
class Plan:
    """What was asked for, checked and read."""

    options: argparse.Namespace
    device: torch.device
    dtype: torch.dtype
    configs: list[LookaheadConfig]
    batches: list[int]
    sampling: SamplingConfig
    tokenizer: Tokenizer
    jobs: list[Job]

    def load_engine(self, exact: bool = True) -> Engine:
        """An engine with just the room that these prompts and configurations need."""
        shapes = [(config.window, config.ngram, config.guesses) for config in self.configs]
        longest = max(len(job.token_ids) for job in self.jobs) + self.options.max_new_tokens
        if self.options.cost:
            longest = exactness_cost.MOST_TOKENS + exactness_cost.NEW_TOKENS
        return Engine.load(
            self.options.ckpt,
            device=str(self.device),
            dtype=dtype_name(self.dtype),
            max_length=longest,
            max_step_rows=max(LookaheadLayout.count_rows(*shape) for shape in shapes),
            exact=exact,
        )


def make_plan(options: argparse.Namespace) -> Plan:
    """Check everything that can be checked without the weights."""
    configs = decode_modes.parse_configs(options.configs)
    batches = parse_batches(options.batches)
    sampling = sampling_of(options)
    if options.logprobs is not None:
        check_whole("--logprobs", options.logprobs, least=0)
    if options.peers not in ("", "transformers"):
        raise InputError(f"--peers: {options.peers!r} is not known, expected transformers")
    peers.parse_peers(options.peers, sampling)
    if options.cost and (options.resume or options.peers):
        raise InputError("--cost decodes a text of its own: leave out --resume and --peers")
    is_more = batches != [1] or options.logprobs is not None or sampling != SamplingConfig()
    if options.cost and is_more:
        raise InputError(
            "--cost decodes one text at a time, greedily: leave out --batches, --logprobs and the "
            "sampling options"
        )
    timing.check_writable(options.json_out)
    timing.check_writable(options.resume, "--resume")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    positions = read_model_config(options.ckpt).max_position_embeddings
    room = positions - options.max_new_tokens
    if room < 1:
        raise InputError(
            f"--max-new-tokens must be less than the {positions} positions of the model, got "
            f"{options.max_new_tokens}"
        )
    most = min(options.most_tokens or positions, room)
    tokenizer = Tokenizer.load(options.ckpt)
    jobs = []
    for path in options.prompts:
        read = [Job(prompt, prompt.token_ids(tokenizer)) for prompt in timing.read_prompts(path)]
        fitting = [job for job in read if options.least_tokens <= len(job.token_ids) <= most]
        jobs += fitting[: options.limit]
    if not jobs:
        raise InputError(f"no prompt has {options.least_tokens}..{most} tokens")
    if len(jobs) < batches[-1]:
        raise InputError(
            f"--batches: {batches[-1]} is more than the {len(jobs)} prompts that there are"
        )
    return Plan(options, device, dtype, configs, batches, sampling, tokenizer, jobs)
