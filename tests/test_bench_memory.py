"""`bench/memory.py`: what is counted, and that memory that is lost shows."""

import json
import mmap
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_checkpoint import write_tiny_checkpoint

from lookahead.models.checkpoint_config import read_model_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import memory
import shapes

CPU = torch.device("cpu")
needs_proc = pytest.mark.skipif(
    not (memory.STATUS.exists() and memory.CLEAR_REFS.exists()), reason="needs Linux's /proc"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("memory") / "checkpoint")


def test_weights_and_cache_are_counted(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    with safe_open(str(checkpoint / "model.safetensors"), framework="pt") as file:
        numbers = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert memory.weight_bytes(config, torch.float32) == 4 * numbers
    assert memory.weight_bytes(config, torch.bfloat16) == 2 * numbers
    # Keys and values of 2 layers, 2 heads of 4 numbers.
    assert memory.cache_bytes(config, torch.float32, 100) == 2 * 2 * 2 * 4 * 100 * 4
    tied = shapes.SHAPES["smollm2-135m"]
    assert memory.weight_bytes(tied, torch.bfloat16) == 2 * 134515008
    assert memory.weight_bytes(shapes.SHAPES["llama-2-7b"], torch.bfloat16) == 2 * 6738415616
    assert memory.weight_bytes(shapes.SHAPES["llama-3-8b"], torch.bfloat16) == 2 * 8030261248


def fresh_pages(size: int) -> mmap.mmap:
    """Memory of its own, all in use: what is allocated may be pages that were resident before."""
    pages = mmap.mmap(-1, size)
    for first in range(0, size, mmap.PAGESIZE):
        pages[first] = 1
    return pages


@needs_proc
def test_the_most_memory_is_seen_and_forgotten() -> None:
    meter = memory.Meter(CPU)
    meter.reset()
    before = meter.now
    held = fresh_pages(50_000_000)
    assert meter.now >= before + 49_000_000
    held.close()
    assert meter.now < before + 10_000_000
    assert meter.most >= before + 49_000_000
    meter.reset()
    assert meter.most < before + 10_000_000


def run(checkpoint: Path, *options: str) -> int:
    given = ["--ckpt", str(checkpoint), "--length", "64", "--max-new-tokens", "16"]
    return memory.main([*given, "--configs", "4,3,2", "--dtype", "float32", *options])


@needs_proc
def test_memory_is_reported(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "memory.json"
    assert run(checkpoint, "--steps", "100", "--json-out", str(out)) == 0
    text, progress = capsys.readouterr()
    assert progress == ""
    record = json.loads(text.splitlines()[-1])
    assert json.loads(out.read_text()) == record
    assert [row["name"] for row in record["rows"]] == [
        "loading",
        "autoregressive",
        "lookahead (4, 3, 2)",
    ]
    known = record["bytes"]
    for row in record["rows"]:
        assert row["beyond"] == row["most"] - known["program"] - known["weights"] - known["cache"]
        assert row["most"] >= row["now"]
    steps = [sample["steps"] for sample in record["samples"]]
    assert steps == sorted(steps)
    assert steps[-1] >= 100
    assert 5 <= len(steps) <= 10  # a request may pass more than one tenth
    assert record["growth_bytes"] == record["samples"][-1]["bytes"] - record["samples"][0]["bytes"]
    assert record["growth_bytes"] < 10_000_000


@needs_proc
def test_lost_memory_shows(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate, lost = memory._generate, []

    def losing(*arguments: object) -> int:
        lost.append(fresh_pages(3_000_000))
        return generate(*arguments)

    monkeypatch.setattr(memory, "_generate", losing)
    assert run(checkpoint, "--steps", "100") == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    requests = 100 / 16 / 3  # at the least: three tokens a step at the most
    assert record["growth_bytes"] >= (requests - 2) * 3_000_000 * 0.9 > 0
    assert len(lost) > requests


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--length", "16"], "--length must be more than --max-new-tokens 16"),
        (["--length", "513"], "at most the 512 positions of the model, got 513"),
        (["--steps", "0"], "--steps: expected a whole number of at least 1"),
    ],
)
def test_memory_refuses_wrong_input_in_one_line(
    checkpoint: Path, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error
