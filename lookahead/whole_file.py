"""Files that are written whole or not at all."""

import shutil
import time
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file beside this one, then put it in its place: whatever goes wrong, what was there stays
    there. Raises OSError or ValueError for a path that cannot be written."""
    if path.exists() and not path.is_file():  # a device, or what cannot be written anyway
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve() if path.is_symlink() else path
    partial = target.with_name(f".{target.name}.{time.time_ns()}")
    try:
        partial.write_text(text, encoding="utf-8")
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
