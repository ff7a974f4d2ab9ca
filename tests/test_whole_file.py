"""Files that are written whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from lookahead.whole_file import write_whole


def test_a_file_takes_the_place_of_another(tmp_path):
    path = tmp_path / "file"
    write_whole(path, "new")
    path.chmod(0o600)
    write_whole(path, "né")
    assert path.read_text("utf-8") == "né"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    write_whole(link, "new")
    assert (link.is_symlink(), path.read_text()) == (True, "new")


def test_what_was_there_stays_if_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")
    write = Path.write_text

    def full(self, text, *arguments, **options):
        write(self, text[:3], *arguments, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "something new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_to(tmp_path):
    write_whole(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "text")
