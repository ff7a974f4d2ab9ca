"""Files that are no GGUF file, or not a whole one."""

import random
import struct
from pathlib import Path

import pytest
from gguf_source import Source, refusal, tiny_source

from lookahead.errors import InputError
from lookahead.import_gguf import import_gguf

gguf = pytest.importorskip("gguf")


@pytest.fixture
def source() -> Source:
    return tiny_source()


def test_damaged_files(source: Source, tmp_path: Path) -> None:
    path = source.write(tmp_path / "model.gguf")
    whole = path.read_bytes()
    last = gguf.GGUFReader(path).tensors[-1]
    end = last.data_offset + last.n_bytes
    assert "begins with b''" in damaged(path, b"")
    assert "begins with b'PK" in damaged(path, b"PK\x03\x04" + whole[4:])
    for size in (4, 8, 20, 23, 500, 3000, last.data_offset - 1000, end - 1):
        assert "damaged or cut short" in damaged(path, whole[:size]), size
    assert "version 77" in damaged(path, whole[:4] + struct.pack("<I", 77) + whole[8:])
    for text in (b"attention.head_count", b"for m in messages"):  # within a key, within a value
        assert "damaged or cut short" in damaged(path, whole.replace(text, b"\xff" + text[1:]))
    info = whole.index(b"output_norm.weight") + len(b"output_norm.weight")
    for at, form, value in (
        (0, "<I", 2**32 - 1),  # number of dimensions
        (4, "<Q", 2**62),  # size
        (12, "<I", 250),  # type
        (16, "<Q", 0),  # offset: onto another tensor
        (16, "<Q", 2**63),
    ):
        data = bytearray(whole)
        struct.pack_into(form, data, info + at, value)
        assert "damaged or cut short" in damaged(path, bytes(data)), (at, value)


def damaged(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return refusal(path)


@pytest.mark.filterwarnings("error")
def test_random_damage_is_refused_or_harmless(source: Source, tmp_path: Path) -> None:
    path = source.write(tmp_path / "model.gguf")
    whole = path.read_bytes()
    header = gguf.GGUFReader(path).data_offset
    refused = 0
    for seed in range(60):
        chance = random.Random(seed)
        data = bytearray(whole)
        # Half of the hits on the keys and tensor infos, which are few bytes beside the tokens.
        start = chance.choice([0, header - 1200])
        for _ in range(2):
            data[chance.randrange(start, header)] = chance.choice([0, 1, 127, 255])
        path.write_bytes(bytes(data))
        try:
            import_gguf(path, tmp_path / str(seed))
        except InputError:
            refused += 1
            assert not (tmp_path / str(seed)).exists()
    assert refused > 20
    assert not list(tmp_path.glob(".*"))


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=message):
            import_gguf(path, tmp_path / "out")
    assert not list(tmp_path.iterdir())
