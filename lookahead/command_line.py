"""What command lines share: wrong input told in one line, exit codes, and life as a program."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import NoReturn

from lookahead.errors import InputError
from lookahead.interrupts import lost_interrupts_come_again

WRONG_INPUT = 2
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")


def print_error(error: object) -> None:
    """One line on standard error, if that can be written."""
    with suppress(OSError):
        print(f"error: {error}", file=sys.stderr)


def exit_code(run: Callable[[], int]) -> int:
    """What `run` returns; where it cannot go on, the exit code for that, told in a line."""
    try:
        with lost_interrupts_come_again():
            return run()
    except InputError as error:
        print_error(error)
        return WRONG_INPUT
    except OSError as error:  # input is read with its own message, so this is about output
        print_error(f"the output cannot be written: {error.strerror}")
        return WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def run_as_program(main: Callable[[], int]) -> NoReturn:
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
        os._exit(WRONG_INPUT)  # told already, and the interpreter would tell again as it ends
    sys.exit(code)
