"""What the benchmarks share: a timer, medians, prompts, where a run took place, and how it is told.

Knows nothing of what is measured.
"""

import argparse
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

try:
    import torch

    import lookahead
    from lookahead.command_line import Parser
    from lookahead.devices import dtype_name
    from lookahead.errors import InputError
    from lookahead.tokenizer import Tokenizer
except ModuleNotFoundError as error:
    print(
        f"error: the package {error.name} cannot be imported: run `make demo` or `pip install -e .` "
        "in the repository first, and this with the same Python",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

Value = TypeVar("Value")

# The code that runs, which need not be the checkout that this file is in.
SOURCE = Path(lookahead.__file__).resolve().parent.parent
DEFAULT_PROMPTS = Path(__file__).resolve().parent / "prompts.jsonl"
INTERRUPTED = 130
# Beside torch, those whose versions a result may depend on.
PACKAGES = ("triton", "transformers", "llama-cpp-python", "lookahead")


@dataclass(frozen=True)
class Spread:
    """Median of some values, and the values that a fifth lie below and a fifth above."""

    median: float
    p20: float
    p80: float

    def to_dict(self) -> dict[str, float]:
        return {"median": self.median, "p20": self.p20, "p80": self.p80}


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), quantile(values, 0.2), quantile(values, 0.8))


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value that `fraction` of the values lie below, on a straight line between neighbours."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def time_call(call: Callable[[], Value], device: torch.device) -> tuple[Value, float]:
    """What `call` returns and the seconds it took, to the end of the work it put on a GPU."""
    _wait(device)
    began = time.perf_counter()
    value = call()
    _wait(device)
    return value, time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file; `is_chat` asks for the checkpoint's chat template, if it has one."""

    id: str
    category: str | None
    text: str
    is_chat: bool

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        if self.is_chat and tokenizer.has_chat_template:
            return tokenizer.chat_ids([{"role": "user", "content": self.text}])
        return tokenizer.encode(self.text)


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file of JSON lines.

    A line has `prompt` (raw text, or a chat message where `chat` is true), `turns` (a list, of which
    the first is taken) or `question`; the last two are chat messages. `id`, `question_id` or `task_id`
    names it, else its line number does. Raises InputError, one line naming file and line.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"prompts file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"prompts file {path} is not UTF-8 at byte {error.start}") from error
    # Not splitlines: a JSON string may hold other line separators as they are.
    numbered = enumerate(text.split("\n"), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    prompts = [_parse_prompt(f"{path}, line {number}", number, line) for number, line in lines]
    if not prompts:
        raise InputError(f"prompts file {path} has no prompts, expected one JSON object a line")
    return prompts[:limit]


def _parse_prompt(where: str, number: int, line: str) -> Prompt:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    found = _prompt_text(fields) if isinstance(fields, dict) else None
    if found is None or not isinstance(found[0], str) or not found[0]:
        raise InputError(
            f'{where}: expected an object with non-empty text as "prompt" or "question" or as the '
            'first of a list of "turns"'
        )
    names = (fields.get(key) for key in ("id", "question_id", "task_id"))
    name = next((name for name in names if name is not None), number)
    category = fields.get("category")
    return Prompt(str(name), None if category is None else str(category), *found)


def _prompt_text(fields: dict[str, Any]) -> tuple[Any, bool] | None:
    """The prompt, whatever it is, and whether it is a chat message."""
    if "prompt" in fields:
        return fields["prompt"], fields.get("chat") is True
    if "turns" in fields:
        turns = fields["turns"]
        return (turns[0], True) if isinstance(turns, list) and turns else None
    return (fields["question"], True) if "question" in fields else None


def provenance(
    device: torch.device, dtype: torch.dtype, prompts: Path | None = None
) -> dict[str, Any]:
    """What somebody needs in order to repeat a run, or to distrust it."""
    commit = _commit()
    return {
        "commit": commit,
        "dirty": None if commit is None else bool(_git("status", "--porcelain")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version(name) for name in PACKAGES},
        },
        "platform": platform.platform(),
        "processor": _processor_name(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "dtype": dtype_name(dtype),
        "prompts": None
        if prompts is None
        else {"file": prompts.name, "sha256": hashlib.sha256(prompts.read_bytes()).hexdigest()},
    }


def _commit() -> str | None:
    """HEAD of the repository of `lookahead`; None where it runs from a copy without git, also if that
    copy lies inside another repository."""
    top = _git("rev-parse", "--show-toplevel")
    is_ours = top is not None and Path(top).resolve() == SOURCE
    return _git("rev-parse", "HEAD") if is_ours else None


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(_aligned(line, widths)).rstrip() for line in lines)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    yield cells[0].ljust(widths[0])
    for cell, width in zip(cells[1:], widths[1:], strict=True):
        yield cell.rjust(width)


def count(text: str) -> int:
    """A whole number of at least 1, as the type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def run_main(
    parser: Parser, run: Callable[[argparse.Namespace], int], arguments: Sequence[str] | None
) -> int:
    """Parse and run; wrong input is one line and exit code 2, Ctrl-C exit code 130."""
    try:
        return run(parser.parse_args(arguments))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def check_writable(path: Path | None, option: str = "--json-out") -> None:
    """Refuse a file that cannot be written before the work is done rather than after."""
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise InputError(f"{option} {path} cannot be written: {error.strerror}") from error


def publish(record: dict[str, Any], path: Path | None) -> None:
    """Print the record as one line of JSON, and write the same to `path` if there is one."""
    line = json.dumps(record, ensure_ascii=False)
    print(line, flush=True)
    if path is not None:
        path.write_text(line + "\n", encoding="utf-8")
