"""Files that are written whole, or stay as they were."""

import os
import stat

import pytest
from full_disk import FullDisk

from lookahead import whole_file
from lookahead.whole_file import write_whole


@pytest.mark.parametrize("before", [None, "", "x", "something much longer than what comes"])
def test_what_is_written_is_all_there_is(tmp_path, before):
    path = tmp_path / ("n" * 255)
    if before is not None:
        path.write_text(before)
        path.chmod(0o600)
    write_whole(path, "né\n")
    assert path.read_bytes() == "né\n".encode()
    assert before is None or stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_links_stay(tmp_path):
    path, link, hard_link = (tmp_path / name for name in ("file", "link", "hard"))
    link.symlink_to(path)
    write_whole(link, "first")
    hard_link.hardlink_to(path)
    write_whole(link, "new")
    assert (link.is_symlink(), path.read_text(), hard_link.read_text()) == (True, "new", "new")


def test_what_was_there_stays_if_writing_fails(tmp_path, monkeypatch):
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_text("old text")
    monkeypatch.setattr(whole_file, "FileIO", FullDisk)
    for each in (path, other):
        with pytest.raises(OSError, match="No space left"):
            write_whole(each, "something new")
    assert path.read_text() == "old text"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file(tmp_path):
    write_whole(tmp_path.__class__(os.devnull), "text")
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "text")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="Too many levels"):
        write_whole(loop, "text")
    assert loop.is_symlink()
