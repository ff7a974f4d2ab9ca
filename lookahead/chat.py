"""A conversation in the terminal: `python -m lookahead.chat --ckpt PATH`. Only parses and prints.

Answers go to standard output, everything about them to standard error. A line is a message; one that
begins with / is a command, and /help lists them. Ctrl-C ends an answer early. Ctrl-D, /quit and the end
of piped input leave with exit code 0, Ctrl-C at the prompt with 130. Wrong input is told in one line
`error: ...`: on the command line it ends the program with exit code 2; within a conversation it is
left out, and only where lines are piped is the exit code 2 in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from lookahead.chat_stats import SessionStats
from lookahead.command_line import WRONG_INPUT, Parser, exit_code, print_error, run_as_program
from lookahead.config import check_whole
from lookahead.display import show
from lookahead.engine_options import (
    add_engine_options,
    add_lookahead_options,
    check_before_loading,
    load_engine,
    lookahead_of,
)
from lookahead.errors import InputError, one_line
from lookahead.sampling_options import add_sampling_options, sampling_of
from lookahead.whole_file import write_whole

if TYPE_CHECKING:
    from lookahead.conversation import Conversation
    from lookahead.engine import Engine
    from lookahead.results import Result
    from lookahead.stream import Stream

PROMPT = "> "
HELP = """\
/help         this list
/reset        forget all messages but the system message
/system TEXT  set the system message, from the next message on; without TEXT there is none
/stats        what the last answer and the session took, and which (W, N, G) and why
/save FILE    write all messages to FILE as JSON
/quit, /exit  leave, as Ctrl-D does
Any other line is a message; put a space before one that begins with /. Ctrl-C ends an answer."""


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = Parser(prog="python -m lookahead.chat", description=__doc__, allow_abbrev=False)
    add_engine_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-new-tokens", type=int, default=1024, metavar="COUNT")
    add_lookahead_options(parser)
    add_sampling_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return exit_code(lambda: _run(build_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    # What can be refused is refused before the model is loaded.
    check_whole("--max-new-tokens", options.max_new_tokens, least=1)
    sampling = sampling_of(options)
    lookahead_of(options, None)
    if sys.stdin is None:
        raise InputError("standard input is closed: a chat reads its messages from there")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # told with its line
    check_before_loading(options, sampling, needs_chat=True)
    engine = load_engine(options)
    conversation = engine.conversation(options.system)
    lookahead = lookahead_of(options, engine)
    if options.mode == "lookahead":
        engine.check_rows(lookahead)

    def say(text: str) -> Stream:
        return conversation.say(
            text,
            max_new_tokens=options.max_new_tokens,
            mode=options.mode,
            lookahead=lookahead,
            sampling=sampling,
        )

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        _greet(engine)
    return Chat(conversation, say, is_terminal).run()


def _greet(engine: Engine) -> None:
    with suppress(ImportError):
        import_module("readline")  # from now on `input` edits lines and remembers them
    room = f"room for {engine.max_length} tokens"
    print(f"{room}; /help lists commands, Ctrl-D leaves", file=sys.stderr)


class Chat:
    """Reads lines until there are no more, and does what each says."""

    def __init__(
        self, conversation: Conversation, say: Callable[[str], Stream], is_terminal: bool
    ) -> None:
        """`say` adds a message to the conversation and starts the answer; on a terminal, where lines
        are typed and answers shown, there is a prompt."""
        self._conversation = conversation
        self._say = say
        self._is_terminal = is_terminal
        self._stats = SessionStats()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP, file=sys.stderr),
            "/reset": lambda _: conversation.reset(),
            "/system": self._set_system,
            "/stats": lambda _: print(self._stats, file=sys.stderr),
            "/save": self._save,
        }

    def run(self) -> int:
        """Returns the exit code."""
        code = 0
        while (line := self._read()) is not None:
            command, _, rest = line.strip().partition(" ")
            is_command = line.startswith("/")
            if is_command and command in ("/quit", "/exit"):
                break
            try:
                if is_command:
                    self._command(command, rest.strip())
                elif line.strip():
                    self._answer(line.strip())
            except InputError as error:
                print_error(error)
                code = code if self._is_terminal else WRONG_INPUT
        return code

    def _read(self) -> str | None:
        """The next line; None at the end."""
        try:
            if self._is_terminal:
                return input(PROMPT)
            line = sys.stdin.readline()  # `input` would write to standard output, if only nothing
            return line.removesuffix("\n") if line else None
        except (EOFError, KeyboardInterrupt) as error:
            if self._is_terminal:
                print()
            if isinstance(error, KeyboardInterrupt):
                raise
            return None
        except OSError as error:
            raise InputError(f"standard input cannot be read: {error.strerror}") from error

    def _command(self, command: str, rest: str) -> None:
        if command not in self._commands:
            raise InputError(
                f"there is no command {command}: /help lists them; put a space before a message that "
                "begins with /"
            )
        self._commands[command](rest)

    def _answer(self, text: str) -> None:
        """One turn, to its end or to Ctrl-C."""
        conversation = self._conversation
        said_before = len(conversation.messages)
        try:
            stream = self._say(text)
            if conversation.is_rewritten:
                self._note(
                    "the chat template, or a new system message, changed what was said before: all of "
                    "it is encoded anew"
                )
            show(stream.batch, silent=False, with_summary=False)
        except KeyboardInterrupt:  # but not while it is shown
            conversation.close()
            print()
        if len(conversation.messages) == said_before:
            self._note("interrupted before the answer began: the message is left out")
        elif conversation.turn is not None:
            self._tell(conversation.turn.stream.result)

    def _tell(self, result: Result) -> None:
        """Count the last answer, and say why it ended if that may be a surprise."""
        conversation = self._conversation
        self._stats.add(result, conversation.prefilled_tokens, conversation.reused_tokens)
        if result.finish_reason == "context":
            self._note("the context is full: /reset begins anew, --max-length may give more room")
        if result.finish_reason == "length":
            self._note(f"ended at {result.new_tokens} tokens, see --max-new-tokens")

    def _note(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr)

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None

    def _save(self, path: str) -> None:
        if not path:
            raise InputError("/save needs the name of a file")
        content = json.dumps(self._conversation.messages, ensure_ascii=False, indent=2)
        file = Path(os.path.expanduser(path))
        if _is_output(file, sys.stdout) or _is_output(file, sys.stderr):
            raise InputError(f"{path} is where this chat writes to: name another file")
        try:
            write_whole(file, f"{content}\n")
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else one_line(error)
            raise InputError(f"{path} cannot be written: {said}") from error


def _is_output(file: Path, output: TextIO) -> bool:
    """Whether a file is what an output was redirected to."""
    try:
        return os.path.isfile(output.fileno()) and os.path.samefile(file, output.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def _program() -> NoReturn:
    """See `run_as_program`."""
    run_as_program(main)


if __name__ == "__main__":
    _program()
