"""A GGUF file's keys and tensors, as it has them. Knows the container, not what is in it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead.errors import InputError, one_line

if TYPE_CHECKING:  # gguf is an optional extra
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderField


def open_gguf(file: Path) -> GGUFReader:
    """Open a file and check that what its header describes is there."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError("it needs the gguf package; pip install 'lookahead[gguf]'") from error

    class WholeReader(GGUFReader):
        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            # The library reads past the end as if nothing stood there, and loops on wild counts.
            if int(count) < 0 or int(offset) + int(count) > len(self.data):
                raise ValueError(f"{count} values at byte {offset} of {len(self.data)}")
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < int(count):
                raise ValueError(f"{count} values at byte {offset} of {len(self.data)}")
            return values

    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise InputError(f"{error.strerror}; expected a GGUF file that can be read") from error
    if magic != b"GGUF":
        raise InputError(f"it begins with {magic!r}, a GGUF file begins with b'GGUF'")
    try:
        reader = WholeReader(file)
    except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        raise damaged(one_line(error)) from error
    if reader.byte_order != "I":
        raise InputError("its byte order is not this machine's; expected a little-endian file")
    spans = sorted((part.data_offset, part.n_bytes, part.name) for part in reader.tensors)
    for (start, size, name), (following, _, other) in pairwise(spans):
        if start + size > following:
            raise damaged(f"tensors {name} and {other} overlap")
    return reader


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """Every key with its value as a plain number, text, or list of these."""
    try:
        return {name: _value(field) for name, field in reader.fields.items()}
    except UnicodeDecodeError as error:
        raise damaged(f"text that is not UTF-8: {error}") from error


def _value(field: ReaderField) -> Any:
    kind = field.types[-1].name
    values: list[Any] = [field.parts[index] for index in field.data]
    if kind == "STRING":
        values = [bytes(value).decode() for value in values]
    elif kind == "FLOAT32":  # as the shortest number that it is: 1e-05, not 9.999999747378752e-06
        values = [float(str(value[0])) for value in values]
    else:
        values = [value[0].item() for value in values]
    return values if field.types[0].name == "ARRAY" else values[0]


def damaged(what: str) -> InputError:
    """The refusal of a file that contradicts itself."""
    return InputError(f"the file is damaged or cut short ({what}); download or convert it again")


def read_list(metadata: dict[str, Any], key: str, kind: type) -> list[Any]:
    """A key that must be there and be a list of `kind`."""
    values = metadata.get(key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise InputError(f"{key} is {shown(values)}, expected a list of {kind.__name__} values")
    return values


def shown(value: Any) -> str:
    """A value for a message."""
    return "missing" if value is None else repr(value)[:80]
