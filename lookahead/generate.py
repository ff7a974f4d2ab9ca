"""The command line: `python -m lookahead.generate --ckpt PATH --prompt TEXT`. Only parses and prints.

Text goes to standard output, everything about it to standard error. Exit codes: 0; 1 when `--compare`
finds a difference; 2 for wrong input, with one line `error: ...`; 130 on Ctrl-C, after printing what
was generated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from lookahead.command_line import INTERRUPTED, Parser, exit_code, run_as_program
from lookahead.config import SamplingConfig, check_whole
from lookahead.display import comparison, numbered_line, show
from lookahead.engine_options import (
    add_engine_options,
    add_lookahead_options,
    check_before_loading,
    load_engine,
    lookahead_of,
)
from lookahead.errors import InputError
from lookahead.prompt_file import read_prompt_file
from lookahead.results import Result
from lookahead.sampling_options import add_sampling_options, sampling_of

if TYPE_CHECKING:
    from lookahead.batch import Batch, OnLogits
    from lookahead.prompt_ids import Prompt
    from lookahead.stream import OnLogits as StreamLogits
    from lookahead.tokenizer import Tokenizer


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = Parser(prog="python -m lookahead.generate", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add_engine_options(parser)
    add("--prompt", action="append", default=[], metavar="TEXT", help="may repeat")
    add(
        "--prompt-file",
        metavar="FILE",
        help='.jsonl: {"prompt": ...} a line; else one prompt; - stdin',
    )
    add(
        "--batch",
        type=int,
        metavar="B",
        help="answers that share a step; by default those to one prompt",
    )
    add("--chat", action="store_true", help="apply the checkpoint's chat template")
    add("--system", metavar="TEXT", help="system message, with --chat")
    add("--max-new-tokens", type=int, default=256, metavar="COUNT")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may repeat",
    )
    add("--ignore-eos", action="store_true", help="go on behind an end-of-text id")
    add_lookahead_options(parser)
    add_sampling_options(parser)
    add("--num-samples", type=int, default=1, metavar="K", help="answers to each prompt")
    add(
        "--logprobs",
        type=int,
        metavar="K",
        help="with --json: log-probabilities of new tokens and of the K most probable ones",
    )
    add(
        "--compare", action="store_true", help="also run autoregressive: same ids? how much faster?"
    )
    add("--stats", action="store_true", help="tell what was chosen, why, and what came of it")
    add("--json", action="store_true", help="one JSON object a prompt on standard output, no more")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return exit_code(lambda: _run(build_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    # What can be refused is refused before the model is loaded.
    sampling = _check_options(options)
    prompts = _read_prompts(options)
    check_before_loading(
        options, sampling, options.logprobs, options.ignore_eos, needs_chat=options.chat
    )
    engine = load_engine(options, options.batch or options.num_samples)
    lookahead = lookahead_of(options, engine, len(prompts) * options.num_samples)
    given = [
        engine.chat_ids(prompt, options.system) if options.chat else prompt for prompt in prompts
    ]

    def start(chosen: Sequence[Prompt], mode: str, on_logits: OnLogits | None = None) -> Batch:
        return engine.batch(
            chosen,
            max_new_tokens=options.max_new_tokens,
            mode=mode,
            lookahead=lookahead,
            sampling=sampling,
            stop=options.stop,
            ignore_eos=options.ignore_eos,
            on_logits=on_logits,
            num_samples=options.num_samples,
            logprobs=options.logprobs,
        )

    def print_object(number: int, result: Result) -> None:
        prompt = prompts[number // options.num_samples]
        values = replace(result, prompt=prompt).to_dict()
        print(json.dumps(values, ensure_ascii=False), flush=True)

    batch = start(given, options.mode)
    at_once = print_object if options.json and not options.compare else None
    results, interrupted = show(batch, options.json, at_once)
    if options.stats:
        from lookahead.stats import stats

        lines = stats(results, batch.budget, engine.costs, engine.capture_seconds)
        print(lines, file=sys.stderr)
    if options.compare and not interrupted:
        others, interrupted = show(start(given, "autoregressive"), silent=True)
        if not interrupted:
            others = [
                replace(each, prompt=prompt) for each, prompt in zip(others, prompts, strict=True)
            ]
            try:
                results = _compare(results, others, given, start, engine.tokenizer)
            except KeyboardInterrupt:  # while looking for the logits of a difference
                interrupted = True
    if options.json and options.compare:
        for number, result in enumerate(results):
            print_object(number, result)
    if interrupted:
        return INTERRUPTED
    return 1 if any(result.identical is False for result in results) else 0


def _compare(
    results: Sequence[Result],
    others: Sequence[Result],
    prompts: Sequence[Prompt],
    start: Callable[..., Batch],
    tokenizer: Tokenizer,
) -> list[Result]:
    """Each prompt's results in both modes side by side, and told on standard error."""
    from lookahead.compare import compared
    from lookahead.stream import Stream, numbered

    found = []
    for number, (result, other, prompt) in enumerate(zip(results, others, prompts, strict=True)):

        def start_one(
            mode: str, on_logits: StreamLogits | None = None, prompt: Prompt = prompt
        ) -> Stream:
            return Stream(start([prompt], mode, numbered(on_logits)))

        found.append(compared(result, other, start_one))
        line = comparison(found[-1], other, tokenizer)
        print(f"{numbered_line(number, len(results))}{line}", file=sys.stderr)
    return found


def _check_options(options: argparse.Namespace) -> SamplingConfig:
    """Refuse what no checkpoint could make right; return what was asked for in sampling."""
    if options.batch is not None:
        check_whole("--batch", options.batch, least=1)
    if options.system is not None and not options.chat:
        raise InputError("--system is part of a chat: add --chat")
    if options.compare and options.mode != "lookahead":
        raise InputError("--compare runs both modes: leave out --mode autoregressive")
    if "" in options.stop:
        raise InputError("--stop is empty: give the text to end before, or leave it out")
    check_whole("--max-new-tokens", options.max_new_tokens, least=1)
    lookahead_of(options, None)
    check_whole("--num-samples", options.num_samples, least=1)
    if options.compare and options.num_samples > 1:
        raise InputError("--compare takes one answer to each prompt: leave out --num-samples")
    if options.logprobs is not None and not options.json:
        raise InputError("--logprobs are part of the JSON: add --json")
    if options.logprobs is not None:
        check_whole("--logprobs", options.logprobs, least=0)
    return sampling_of(options)


def _read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts that were given, at least one."""
    prompts = list(options.prompt)
    if options.prompt_file is not None:
        prompts += read_prompt_file(options.prompt_file)
    if not prompts:
        raise InputError("there is no prompt: give --prompt TEXT or --prompt-file FILE")
    return prompts


def _program() -> NoReturn:
    """See `run_as_program`."""
    run_as_program(main)


if __name__ == "__main__":
    _program()
