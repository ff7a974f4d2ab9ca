"""Finished prompts of an earlier run: what was found on each, in a file of JSON lines."""

import hashlib
import json
from pathlib import Path
from typing import Any

import timing
import torch
from decode_modes import Job
from exactness_plan import Plan

from lookahead.devices import dtype_name
from lookahead.errors import InputError
from lookahead.json_file import parse_json_object

Found = list[dict[str, Any]]


class Finished:
    """What was found on prompts, by key; what is added is in the file before anything else happens."""

    def __init__(self, plan: Plan) -> None:
        """Raises InputError where the file is of another run, or of none."""
        self._path: Path | None = plan.options.resume
        self._request = _request(plan)
        self._records = _read(self._path, self._request)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Found:
        return self._records[key]["found"]

    def add(self, key: str, found: Found) -> None:
        self._records[key] = {"key": key, "request": self._request, "found": found}
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._records[key]) + "\n")


def key_of(number: int, job: Job) -> str:
    """A prompt by its place, its name and its ids."""
    digest = hashlib.sha256(json.dumps(job.token_ids).encode()).hexdigest()
    return f"{number} {job.prompt.id} {digest[:16]}"


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
        "batches": plan.batches,
        "logprobs": options.logprobs,
        "max_new_tokens": options.max_new_tokens,
        "sampling": repr(plan.sampling),
        "peers": options.peers,
    }


def _read(path: Path | None, request: dict[str, Any]) -> dict[str, dict[str, Any]]:
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
