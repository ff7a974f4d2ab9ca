"""A checkpoint's chat template: messages to the text of a prompt.

Knows where a template is kept and what the field's templates expect of their surroundings. The
template is code from a stranger, so it runs in a sandbox. Does not know ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lookahead.errors import InputError, one_line

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplate:
    """One template and the special tokens it may name, such as `bos_token`, given as text."""

    def __init__(self, source: str, origin: Path, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._origin = origin
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that `messages` ({"role": ..., "content": ...}) make, up to the answer."""
        if not messages:
            raise InputError(
                "the chat has no messages; give at least one, with a role and a content"
            )
        variables = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        try:
            return _environment().from_string(self._source).render(variables)
        except TemplateSyntaxError as error:
            raise InputError(
                f"the chat template in {self._origin} is not valid, line {error.lineno}: "
                f"{one_line(error)}; mend the template, or give plain prompts (without --chat)"
            ) from error
        # The template is the checkpoint's own code: whatever goes wrong in it is wrong input.
        except Exception as error:
            said = one_line(error)
            if not isinstance(error, TemplateError):
                said = f"{type(error).__name__}: {said}"
            raise InputError(
                f"the chat template in {self._origin} refused the messages: {said}; "
                "change the messages as it asks, or give plain prompts (without --chat)"
            ) from error


def find_chat_template(directory: Path, config: Mapping[str, Any]) -> tuple[str, Path] | None:
    """The template and the file it stands in; `config` is the content of tokenizer_config.json."""
    path = directory / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), path
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path} cannot be read ({one_line(error)}); expected a UTF-8 Jinja template"
            ) from error
    path = directory / "tokenizer_config.json"
    template = config.get("chat_template")
    if isinstance(template, list):
        template = _default_template(template, path)
    if template is None:
        return None
    if not isinstance(template, str):
        raise InputError(
            f"{path}: chat_template is {type(template).__name__}; expected text, or a list of "
            'objects with "name" and "template"'
        )
    return template, path


def _default_template(entries: list[Any], path: Path) -> Any:
    try:
        return {entry["name"]: entry["template"] for entry in entries}.get("default")
    except (TypeError, KeyError) as error:
        raise InputError(
            f'{path}: an entry of chat_template is not an object with "name" and "template"'
        ) from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes `<`, `>` and `&` for HTML; a prompt must hold them as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
