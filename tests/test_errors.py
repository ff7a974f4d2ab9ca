"""Messages are one line whatever they quote."""

from lookahead.errors import InputError, one_line


def test_a_message_is_one_printable_line():
    error = InputError("no such directory: a\nb\x1b[31m\udcff\u2028é漢 '  '")
    assert str(error) == "no such directory: a?b?[31m??é漢 '  '"
    assert isinstance(error, ValueError)


def test_what_a_library_says_loses_its_line_breaks():
    assert one_line(RuntimeError("line one\n\n    line two\t ")) == "line one line two"
