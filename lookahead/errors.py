"""The one exception for wrong input: a prompt, an option, a checkpoint, a device.

Its message is a single line that says what was wrong, what was expected and what to do, so that the
command line can print it as it is.
"""


class InputError(ValueError):
    """Something the caller gave cannot be used. The message is one line, fit to show to a user.

    Names and values from outside may hold anything: what cannot be printed is shown as `?`.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(char if char.isprintable() else "?" for char in message))


def one_line(error: BaseException) -> str:
    """What another library's error says, for use in a message."""
    return " ".join(str(error).split())
