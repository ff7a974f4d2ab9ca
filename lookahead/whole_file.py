"""Files that are written whole, or stay as they were."""

import os
from contextlib import suppress
from io import FileIO
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in place, so that links to it and who may read it stay; if it cannot be written to
    its end, what was there is put back. Raises OSError or ValueError for what cannot be written."""
    data = text.encode("utf-8")
    if os.path.isfile(path):
        with FileIO(path, "r+") as file:
            before = file.readall()
            try:
                _write(file, data)
            except OSError:
                _write(file, before)
                raise
        return
    is_new = not os.path.lexists(path)
    try:
        with FileIO(path, "w") as file:
            _write_all(file, data)
    except OSError:
        if is_new:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def _write(file: FileIO, data: bytes) -> None:
    """Replace all that a file holds. It is cut last: until then the room of what was there is kept."""
    file.seek(0)
    _write_all(file, data)
    file.truncate(len(data))


def _write_all(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
