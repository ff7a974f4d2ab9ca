"""The command line: `python -m lookahead.generate --ckpt PATH --prompt TEXT`. Only parses and prints.

Text goes to standard output, everything about it to standard error. Exit codes: 0; 1 when `--compare`
finds a difference; 2 for wrong input, with one line `error: ...`; 130 on Ctrl-C, after printing what
was generated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn

from lookahead.command_line import Parser
from lookahead.config import DTYPE_NAMES, MODES, LookaheadConfig, SamplingConfig, check_whole
from lookahead.display import comparison, numbered_line, show
from lookahead.errors import InputError
from lookahead.interrupts import lost_interrupts_come_again
from lookahead.prompt_file import read_prompt_file
from lookahead.results import Result

if TYPE_CHECKING:
    from lookahead.batch import Batch, OnLogits
    from lookahead.engine import Engine
    from lookahead.prompt_ids import Prompt
    from lookahead.stream import OnLogits as StreamLogits
    from lookahead.tokenizer import Tokenizer

INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """All options; window, ngram and guesses are the paper's W, N and G."""
    parser = Parser(prog="python -m lookahead.generate", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt", required=True, metavar="PATH", help="checkpoint directory")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may repeat")
    add(
        "--prompt-file",
        metavar="FILE",
        help='.jsonl: {"prompt": ...} a line; else one prompt; - stdin',
    )
    add("--batch", type=int, default=1, metavar="B", help="prompts that share a step")
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
    add("--mode", choices=MODES, default="lookahead")
    add("--window", type=int, metavar="W", help="columns of the lookahead window")
    add("--ngram", type=int, metavar="N", help="tokens of an n-gram, its key included")
    add("--guesses", type=int, metavar="G", help="candidates verified in a step")
    add("--no-prompt-ngrams", action="store_true", help="start with an empty n-gram pool")
    add("--temperature", type=float, default=0.0, help="only 0, greedy, as yet")
    for name, kind in (("top-k", int), ("top-p", float), ("min-p", float)):
        add(f"--{name}", type=kind, help="not yet")
    add("--repetition-penalty", type=float, help="not yet")
    add("--seed", type=int, default=0)
    add("--device", default="auto", metavar="auto|cpu|cuda[:i]")
    add("--dtype", default="auto", metavar="|".join(("auto", *DTYPE_NAMES)))
    add("--max-length", type=int, metavar="COUNT", help="tokens of prompt and answer together")
    add(
        "--compare", action="store_true", help="also run autoregressive: same ids? how much faster?"
    )
    add("--stats", action="store_true", help="tell what was chosen, why, and what came of it")
    add("--json", action="store_true", help="one JSON object a prompt on standard output, no more")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        with lost_interrupts_come_again():
            return _run(build_parser().parse_args(arguments))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # input is read with its own message, so this is about output
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    # What can be refused is refused before the model is loaded.
    sampling = _check_options(options)
    prompts = _read_prompts(options)
    # Only now, so that wrong options are told at once and Ctrl-C finds its handler while torch loads.
    from lookahead.engine import Engine
    from lookahead.stats import stats

    engine = Engine.load(
        options.ckpt,
        device=options.device,
        dtype=options.dtype,
        max_length=options.max_length,
        batch_size=options.batch,
    )
    lookahead = _lookahead_config(options, engine, len(prompts))
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
        )

    def print_object(number: int, result: Result) -> None:
        values = replace(result, prompt=prompts[number]).to_dict()
        print(json.dumps(values, ensure_ascii=False), flush=True)

    batch = start(given, options.mode)
    at_once = print_object if options.json and not options.compare else None
    results = show(batch, options.json, at_once)
    if options.stats:
        lines = stats(results, batch.budget, engine.costs, engine.capture_seconds)
        print(lines, file=sys.stderr)
    interrupted = _any_interrupted(results)
    if options.compare and not interrupted:
        others = show(start(given, "autoregressive"), silent=True)
        interrupted = _any_interrupted(others)
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


def _any_interrupted(results: Sequence[Result]) -> bool:
    return any(result.finish_reason == "interrupted" for result in results)


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
    check_whole("--batch", options.batch, least=1)
    if options.system is not None and not options.chat:
        raise InputError("--system is part of a chat: add --chat")
    if options.compare and options.mode != "lookahead":
        raise InputError("--compare runs both modes: leave out --mode autoregressive")
    if "" in options.stop:
        raise InputError("--stop is empty: give the text to end before, or leave it out")
    check_whole("--max-new-tokens", options.max_new_tokens, least=1)
    _lookahead_config(options)
    return SamplingConfig(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )


def _lookahead_config(
    options: argparse.Namespace, engine: Engine | None = None, num_prompts: int = 1
) -> LookaheadConfig:
    """What was given of (W, N, G) with the rest of the default; the one that is tuned for so many
    prompts where nothing was. Without an engine, to check what was given."""
    given = {
        name: getattr(options, name)
        for name in ("window", "ngram", "guesses")
        if getattr(options, name) is not None
    }
    if engine is None:
        default = LookaheadConfig()
    elif given or options.mode == "autoregressive":
        default = engine.default_lookahead()
    else:
        default = engine.tuning_for(num_prompts).config
    prompt_ngrams = not options.no_prompt_ngrams
    return replace(default, prompt_ngrams=prompt_ngrams, seed=options.seed, **given)


def _read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts that were given, at least one."""
    prompts = list(options.prompt)
    if options.prompt_file is not None:
        prompts += read_prompt_file(options.prompt_file)
    if not prompts:
        raise InputError("there is no prompt: give --prompt TEXT or --prompt-file FILE")
    return prompts


def _program() -> NoReturn:
    """`main` as a program of its own, whatever its surroundings left open."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed; a later file must not get its number
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us without a traceback
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # whatever the surroundings say: so is JSON
    code = main()
    try:
        sys.stdout.flush()
    except OSError:
        os._exit(2)  # told already, and the interpreter would tell again as it ends
    sys.exit(code)


if __name__ == "__main__":
    _program()
