"""What the command lines share: options that are refused in one line, like all other wrong input."""

import argparse
from typing import NoReturn

from lookahead.errors import InputError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")
