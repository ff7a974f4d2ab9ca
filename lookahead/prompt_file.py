"""Prompts of a file, or of standard input."""

import sys
from pathlib import Path

from lookahead.errors import InputError
from lookahead.json_file import parse_json_object


def read_prompt_file(name: str) -> list[str]:
    """Prompts of a .jsonl file, or the whole of another file or of standard input."""
    where = "standard input" if name == "-" else f"prompt file {name}"
    if name == "-" and sys.stdin is None:
        raise InputError("standard input is closed: give --prompt TEXT or a file")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(
            f"{where} cannot be read: {error.strerror}; expected a file of UTF-8 text"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8: byte {error.start} is {data[error.start]:#04x}; convert it"
        ) from error
    if not name.endswith(".jsonl"):
        return [text]
    prompts = [
        _json_prompt(f"{where}, line {number}", line)
        # Not splitlines: JSON's strings may hold other line ends as they are.
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not prompts:
        raise InputError(f'{where} has no prompts: expected a line {{"prompt": TEXT}} for each')
    return prompts


def _json_prompt(where: str, line: str) -> str:
    prompt = parse_json_object(line, where).get("prompt")
    if not isinstance(prompt, str):
        raise InputError(f'{where}: expected an object with a string "prompt"')
    return prompt
