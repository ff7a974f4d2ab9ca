"""Is lookahead's text autoregressive decoding's, bit for bit?

Runs each prompt autoregressively and with each configuration, and compares ids and the logits that
each emitted token is the choice of. `--peers transformers` compares its greedy decoding with its prompt
look-up decoding. `--resume FILE` keeps finished prompts there and goes on from them. `--cost` compares
step times instead: the exact engine over the same engine without exactness. Progress goes to standard
error, tables and a last line of JSON to standard output. Exit codes: 0; 1 when a configuration differs;
2 for wrong input.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing  # first, for it says in one line that the package cannot be imported

# isort: split
import decode_modes
import exactness_cost
import exactness_peer
import peers
import torch
from decode_modes import Job
from exactness_texts import compare_texts
from tqdm import tqdm

from lookahead import Engine, LookaheadConfig
from lookahead.config import AUTOREGRESSIVE
from lookahead.devices import choose_device, choose_dtype, dtype_name
from lookahead.errors import InputError
from lookahead.json_file import parse_json_object
from lookahead.layout import LookaheadLayout
from lookahead.models.checkpoint_config import read_model_config
from lookahead.tokenizer import Tokenizer


def build_parser() -> timing.Parser:
    """All options."""
    parser = timing.Parser(prog="bench/exactness.py", description=__doc__, allow_abbrev=False)
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
    add("--max-new-tokens", type=timing.count, default=128, metavar="COUNT")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--threads", type=timing.count, metavar="COUNT")
    add("--peers", default="", metavar="NAME", help="transformers, or nothing (default)")
    add("--resume", type=Path, metavar="FILE", help="JSON lines of finished prompts")
    add("--cost", action="store_true", help="only compare step times with and without exactness")
    add("--json-out", type=Path, metavar="FILE", help="write the line of JSON here too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    return timing.run_main(build_parser(), _run, arguments)


@dataclass(frozen=True)
class Plan:
    """What was asked for, checked and read, before any weights are loaded."""

    options: argparse.Namespace
    device: torch.device
    dtype: torch.dtype
    configs: list[LookaheadConfig]
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


def _run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    if options.cost:
        engines = plan.load_engine(), plan.load_engine(exact=False)
        rows = exactness_cost.measure(*engines, plan.configs, plan.tokenizer)
        print(f"{_where(plan)}\n\n{exactness_cost.table(rows)}\n")
        record: dict[str, Any] = {"benchmark": "exactness_cost", "rows": rows}
    else:
        found = list(_compare_all(plan))
        rows = summarise(found)
        print(f"{_where(plan)}, {len(found)} prompts\n\n{table(rows)}\n")
        record = {"benchmark": "exactness", "rows": rows, "prompts": len(found)}
    record |= {
        "checkpoint": options.ckpt.resolve().name,
        "max_new_tokens": options.max_new_tokens,
        "files": [str(path.name) for path in options.prompts],
        "provenance": timing.provenance(plan.device, plan.dtype, options.prompts[0]),
    }
    timing.publish(record, options.json_out)
    ours = [row for row in rows if row.get("peer") is False]
    return int(any(row["identical"] < row["prompts"] or row["logits_differ"] for row in ours))


def _where(plan: Plan) -> str:
    return f"{dtype_name(plan.dtype)} on {plan.device}, {torch.get_num_threads()} threads"


def _plan(options: argparse.Namespace) -> Plan:
    """Check everything that can be checked without the weights."""
    configs = decode_modes.parse_configs(options.configs)
    if options.peers not in ("", "transformers"):
        raise InputError(f"--peers: {options.peers!r} is not known, expected transformers")
    peers.parse_peers(options.peers)
    if options.cost and (options.resume or options.peers):
        raise InputError("--cost decodes a text of its own: leave out --resume and --peers")
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
    return Plan(options, device, dtype, configs, tokenizer, jobs)


def _compare_all(plan: Plan) -> Iterator[dict[str, Any]]:
    """What was found on each prompt, that of an earlier run included."""
    request = _request(plan)
    done = _read_finished(plan.options.resume, request)
    engine = plan.load_engine()
    if engine.model.inexact_reason is not None:
        raise InputError(f"this engine is not exact here: {engine.model.inexact_reason}")
    peer = None
    if plan.options.peers:
        peer = exactness_peer.LookUpPeer(
            plan.options.ckpt, engine.model.config, plan.dtype, plan.device
        )
    for number, job in enumerate(tqdm(plan.jobs, unit="prompt", disable=None)):
        digest = hashlib.sha256(json.dumps(job.token_ids).encode()).hexdigest()
        key = f"{number} {job.prompt.id} {digest[:16]}"
        if key not in done:
            found = _compare(engine, plan, job)
            if peer is not None:
                found.append(peer.compare(job.token_ids, plan.options.max_new_tokens))
            done[key] = {"key": key, "request": request, "found": found}
            if plan.options.resume is not None:
                with plan.options.resume.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[key]) + "\n")
        yield done[key]


def _request(plan: Plan) -> dict[str, Any]:
    """What two runs must have in common for one to go on from the other."""
    options = plan.options
    where = timing.provenance(plan.device, plan.dtype)
    return {
        "checkpoint": str(options.ckpt.resolve()),
        "commit": where["commit"],
        "dirty": where["dirty"],
        "versions": where["versions"],
        "processor": where["gpu"] or where["processor"],
        "dtype": dtype_name(plan.dtype),
        "threads": torch.get_num_threads(),
        "configs": options.configs,
        "max_new_tokens": options.max_new_tokens,
        "peers": options.peers,
    }


def _read_finished(path: Path | None, request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--resume {path} is no text, expected JSON lines of a run") from error
    whole = text[: text.rfind("\n") + 1]  # a run that was stopped may have left half a line
    records = [
        parse_json_object(line, f"--resume {path}, line {number}")
        for number, line in enumerate(whole.splitlines(), start=1)
    ]
    for number, record in enumerate(records, start=1):
        if set(record) != {"key", "request", "found"} or record["request"] != request:
            raise InputError(
                f"--resume {path}, line {number} is of another run: give the options of that run, or "
                "another file"
            )
    if whole != text:
        # Only what this program wrote is cut: lines before tell, or how the line begins.
        half = text[len(whole) :]
        if not records and not '{"key": "'.startswith(half[:9]):
            raise InputError(f"--resume {path} is no file of a run: give another file")
        path.write_text(whole, encoding="utf-8")
    return {record["key"]: record for record in records}


def _compare(engine: Engine, plan: Plan, job: Job) -> list[dict[str, Any]]:
    """Each configuration against autoregressive decoding."""
    most = plan.options.max_new_tokens
    plain_ids, plain_logits = emitted(engine, job.token_ids, AUTOREGRESSIVE, most)
    found = []
    for config in plan.configs:
        ids, logits = emitted(engine, job.token_ids, config, most)
        found.append(
            {
                "name": f"{decode_modes.label(config)} {(config.window, config.ngram, config.guesses)}",
                "peer": False,
                **compare_texts((plain_ids, plain_logits), (ids, logits)),
            }
        )
    return found


def emitted(
    engine: Engine, token_ids: list[int], config: LookaheadConfig, max_new_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """New ids, and the logits [new, vocab] that they are the choices of."""
    rows: list[torch.Tensor] = []
    mode = "autoregressive" if config == AUTOREGRESSIVE else "lookahead"
    stream = engine.stream(
        token_ids,
        max_new_tokens=max_new_tokens,
        mode=mode,
        lookahead=config,
        on_logits=lambda logits: rows.append(logits.clone()),
    )
    return stream.run_to_end().token_ids, torch.cat(rows)


def summarise(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each configuration and peer."""
    rows = []
    for column in zip(*(record["found"] for record in found), strict=True):
        parted = [each for each in column if not each["identical"]]
        first = min(parted, key=lambda each: each["first_difference"], default=None)
        rows.append(
            {
                "name": column[0]["name"],
                "peer": column[0]["peer"],
                "prompts": len(column),
                "identical": len(column) - len(parted),
                "tokens": sum(each["tokens"] for each in column),
                "logits_compared": sum(each["logits_compared"] for each in column),
                "logits_differ": sum(each["logits_differ"] for each in column),
                "first_difference": first and first["first_difference"],
                "margin": first and first["margin"],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = ("", "prompts identical", "logits that differ", "first difference", "margin")
    lines = [header]
    for row in rows:
        logits = f"{row['logits_differ']} of {row['logits_compared']}"
        place, margin = row["first_difference"], row["margin"]
        lines.append(
            (
                row["name"],
                f"{row['identical']} of {row['prompts']}",
                logits,
                "none" if place is None else f"token {place}",
                "" if margin is None else f"{margin:.3g}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
