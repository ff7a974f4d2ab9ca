"""JSON objects from files and lines, and how what is wrong with them is said."""

import pytest

from lookahead.errors import InputError
from lookahead.json_file import parse_json_object, read_json_object


def test_an_object_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{\n"a": [1, "é"]}', encoding="utf-8")
    assert read_json_object(path) == {"a": [1, "é"]}
    assert read_json_object(path, optional=True) == {"a": [1, "é"]}
    assert parse_json_object('{"a": null}', "here") == {"a": None}


def test_only_an_optional_file_may_be_missing(tmp_path):
    path = tmp_path / "none.json"
    assert read_json_object(path, optional=True) == {}
    with pytest.raises(InputError) as caught:
        read_json_object(path)
    assert str(caught.value).startswith(f"{path} cannot be read as JSON: ")
    assert "No such file" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        # What stands between the two is Python's own account, and each version words it anew.
        (b"", ("cannot be read as JSON: ", "; expected an object")),
        (b'{"a": ', ("cannot be read as JSON: ", "line 1 column 7 (char 6); expected an object")),
        (
            b'{"a": "\xff"}',
            ("cannot be read as JSON: ", "; expected a UTF-8 file with an object"),
        ),
        (b"[" * 100_000, ("cannot be read as JSON: ", "; expected an object")),
        (b'{"a": ' + b"1" * 5000 + b"}", ("cannot be read as JSON: ", "; expected an object")),
        (b"[1]", ("must hold a JSON object, got list", "")),
        (b"null", ("must hold a JSON object, got NoneType", "")),
    ],
    ids=["empty", "cut", "not UTF-8", "too deep", "too long a number", "list", "null"],
)
def test_what_is_wrong_is_said_with_the_file(content, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_json_object(path, optional=True)
    begins, ends = said
    message = str(caught.value)
    assert message.startswith(f"{path} {begins}")
    assert message.endswith(ends)
    assert "\n" not in message
