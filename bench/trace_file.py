"""A file of recorded answers: which token a model chose at every row of every step, prompt by prompt.

Numbers are kept as compressed 32-bit integers, and the file with its digest, so that a damaged one is
refused. Knows no model.
"""

import base64
import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lookahead import LookaheadConfig
from lookahead.errors import InputError
from lookahead.json_file import read_json_object

FORMAT = "lookahead trace, version 1"


@dataclass(frozen=True)
class RecordedRun:
    """One prompt decoded with one configuration.

    Attributes:
        token_ids: the new ids.
        checks: a number for each step that tells its rows from others.
        answers: for each step the chosen token of each live row that has logits, in order.
    """

    config: LookaheadConfig
    token_ids: list[int]
    checks: list[int]
    answers: list[list[int]]

    @property
    def steps(self) -> int:
        return len(self.checks)


@dataclass(frozen=True)
class RecordedPrompt:
    """A prompt's ids and its runs, autoregressive decoding first."""

    id: str
    category: str | None
    token_ids: list[int]
    runs: list[RecordedRun]


@dataclass(frozen=True)
class Trace:
    """All prompts with the same configurations; `source` is where they were recorded."""

    vocab_size: int
    source: dict[str, Any]
    prompts: list[RecordedPrompt]

    @property
    def configs(self) -> list[LookaheadConfig]:
        return [run.config for run in self.prompts[0].runs]


def write_trace(trace: Trace, path: Path) -> None:
    body = {
        "format": FORMAT,
        "vocab_size": trace.vocab_size,
        "source": trace.source,
        "prompts": [
            {
                "id": prompt.id,
                "category": prompt.category,
                "token_ids": _pack(prompt.token_ids),
                "runs": [
                    {
                        "config": asdict(run.config),
                        "token_ids": _pack(run.token_ids),
                        "checks": _pack(run.checks),
                        "counts": _pack([len(row) for row in run.answers]),
                        "answers": _pack([token for row in run.answers for token in row]),
                    }
                    for run in prompt.runs
                ],
            }
            for prompt in trace.prompts
        ],
    }
    path.write_text(json.dumps({**body, "sha256": _digest(body)}) + "\n", encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """Raises InputError, one line, for a file that is not whole or not a trace."""
    body = read_json_object(path)
    if body.get("format") != FORMAT:
        raise InputError(f"trace {path}: expected a file of --record, with format {FORMAT!r}")
    if body.pop("sha256", None) != _digest(body):
        raise InputError(f"trace {path} is damaged: it has not the digest it was written with")
    return Trace(
        body["vocab_size"],
        body["source"],
        [
            RecordedPrompt(
                prompt["id"],
                prompt["category"],
                _unpack(prompt["token_ids"]),
                [_parse_run(run) for run in prompt["runs"]],
            )
            for prompt in body["prompts"]
        ],
    )


def _parse_run(fields: dict[str, Any]) -> RecordedRun:
    answers = iter(_unpack(fields["answers"]))
    return RecordedRun(
        LookaheadConfig(**fields["config"]),
        _unpack(fields["token_ids"]),
        _unpack(fields["checks"]),
        [[next(answers) for _ in range(count)] for count in _unpack(fields["counts"])],
    )


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _pack(numbers: list[int]) -> str:
    data = np.array(numbers, dtype="<i4").tobytes()
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def _unpack(text: str) -> list[int]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<i4").tolist()
