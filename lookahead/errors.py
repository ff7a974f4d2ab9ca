"""The one exception for wrong input: a prompt, an option, a checkpoint, a device.

Its message is a single line that says what was wrong, what was expected and what to do, so that the
command line can print it as it is.
"""


class InputError(ValueError):
    """Something the caller gave cannot be used. The message is one line, fit to show to a user."""
