"""A checkpoint is written whole or not at all; the command line."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_source import (
    Source,
    add_weight,
    assert_weights,
    imported,
    read_json,
    refusal,
    tiny_source,
)

from lookahead.errors import InputError
from lookahead.import_gguf import import_gguf, main


@pytest.fixture
def source() -> Source:
    return tiny_source()


def test_shards(source: Source, tmp_path: Path) -> None:
    add_weight(
        source, "output", "lm_head", tuple(source.expected["model.embed_tokens.weight"].shape)
    )
    out_dir = imported(source, tmp_path, shard_bytes=60_000)
    assert_weights(out_dir, source.expected)
    index = read_json(out_dir / "model.safetensors.index.json")
    assert set(index["weight_map"]) == set(source.expected)
    assert index["metadata"]["total_size"] == sum(4 * w.numel() for w in source.expected.values())
    shards = sorted(path.name for path in out_dir.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == shards
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        sizes = [
            4 * source.expected[name].numel()
            for name, holder in index["weight_map"].items()
            if holder == shard
        ]
        assert sum(sizes) <= 60_000 or len(sizes) == 1


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_failing_midway_leaves_nothing(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    import safetensors.numpy

    save_file, calls = safetensors.numpy.save_file, []

    def fail_on_second(*arguments: Any, **options: Any) -> None:
        calls.append(sorted(tmp_path.iterdir()))
        if len(calls) == 2:
            raise failure
        save_file(*arguments, **options)

    monkeypatch.setattr(safetensors.numpy, "save_file", fail_on_second)
    path = source.write(tmp_path / "model.gguf")
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else InputError
    with pytest.raises(expected) as caught:
        import_gguf(path, tmp_path / "out", shard_bytes=60_000)
    assert len(calls[1]) == 2, "it was writing somewhere"
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == [path]
    if expected is InputError:
        assert "No space left on device" in str(caught.value)


def test_a_disk_too_full_for_the_tokenizer_leaves_nothing(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source.write(tmp_path / "model.gguf")
    mkdir = Path.mkdir

    def mkdir_on_a_full_disk(self: Path, *arguments: Any, **options: Any) -> None:
        mkdir(self, *arguments, **options)
        (self / "tokenizer.json").symlink_to("/dev/full")

    monkeypatch.setattr(Path, "mkdir", mkdir_on_a_full_disk)
    message = refusal(path)
    assert "out cannot be written: " in message
    assert "No space left on device" in message


def test_disk_space_is_checked_first(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "1,000 are free" in refusal(source.write(tmp_path / "model.gguf"))


def test_out_dir(source: Source, tmp_path: Path) -> None:
    path = source.write(tmp_path / "model.gguf")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    for out_dir in (taken, path):
        with pytest.raises(InputError, match="exists and is not an empty directory"):
            import_gguf(path, out_dir)
    assert (taken / "mine.txt").read_text() == "mine"
    assert sorted(tmp_path.rglob("*")) == [path, taken, taken / "mine.txt"]
    with pytest.raises(InputError, match="cannot be written"):
        import_gguf(path, path / "below-a-file")
    empty = tmp_path / "empty"
    empty.mkdir()
    for out_dir in (empty, tmp_path / "new" / "deep"):
        import_gguf(path, out_dir)
        assert_weights(out_dir, source.expected)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_command_line(source: Source, tmp_path: Path) -> None:
    path, out_dir = source.write(tmp_path / "model.gguf"), tmp_path / "out"
    command = [sys.executable, "-m", "lookahead.import_gguf", str(path), str(out_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote {out_dir}\n"
    assert_weights(out_dir, source.expected)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (2, "")
    expected = f"error: {out_dir} exists and is not an empty directory; name a new one\n"
    assert again.stderr == expected


@pytest.mark.parametrize("arguments", [[], ["model.gguf"], ["a", "b", "c"], ["a", "b", "--wild"]])
def test_command_line_refuses_wrong_arguments_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.endswith("; see --help\n")
    assert output.err.count("\n") == 1


def test_command_line_without_the_gguf_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main([str(tmp_path / "model.gguf"), str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert "pip install 'lookahead[gguf]'" in output.err


def test_command_line_interrupted(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.numpy.save_file", interrupt)
    path = source.write(tmp_path / "model.gguf")
    assert main([str(path), str(tmp_path / "out")]) == 130
    assert list(tmp_path.iterdir()) == [path]
