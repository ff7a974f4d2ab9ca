"""JSON objects from outside: a checkpoint's small files, lines of prompts."""

import json
from pathlib import Path
from typing import Any

from lookahead.errors import InputError, one_line


def read_json_object(path: Path, optional: bool = False) -> dict[str, Any]:
    """The object in a file, an empty one where an optional file is not there. Raises InputError naming
    the file."""
    if optional and not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read as JSON: {one_line(error)}; expected a UTF-8 file with an object"
        ) from error
    return parse_json_object(text, str(path))


def parse_json_object(text: str, where: str) -> dict[str, Any]:
    """The object that `text` is. Raises InputError that begins with `where` the text stands."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: too many brackets
        raise InputError(
            f"{where} cannot be read as JSON: {one_line(error)}; expected an object"
        ) from error
    if not isinstance(value, dict):
        raise InputError(f"{where} must hold a JSON object, got {type(value).__name__}")
    return value
