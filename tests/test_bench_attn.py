"""The attention benchmark where there is no GPU: its figures, its reports, and what it refuses."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

from lookahead import InputError
from lookahead.kernels.attn_mask import attend
from lookahead.kernels.tuning import Tile
from lookahead.layout import RowTree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import attn_cases
import attn_cpu
import attn_gpu
import attn_mask
import attn_plot
import attn_static
import attn_sweep
from attn_cases import Case, Heads

# As in tests/kernels: the interpreter is chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

CPU = torch.device("cpu")
SMALL = Heads("GQA 4:2", 4, 2, 16)
BUILD = {"architecture": "sm_90", "warps": 4, "registers": 168, "shared": 64 * 1024}

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn_cpu, "INTERPRETED", attn_cpu.INTERPRETED[:2])


# Without a GPU


@without_gpu
@pytest.mark.usefixtures("few_cases")
def test_attention_is_checked_timed_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="Triton is not available for this platform")
    out = tmp_path / "out.json"
    arguments = ["--lengths", "0,37", "--repeats", "2", "--json-out", str(out)]
    assert attn_mask.main(arguments) == 0
    text, progress = capsys.readouterr()
    assert progress == "", "progress bars are for terminals"
    assert text.startswith("nothing was timed on a GPU: ")
    record = json.loads(text.splitlines()[-1])
    assert json.loads(out.read_text()) == record
    assert record["timed_on_gpu"] is False
    assert len(record["rows"]) == len(attn_cpu.MODELS) * len(attn_cases.SHAPES) * 2
    assert {row["length"] for row in record["rows"]} == {0, 37}
    assert all(row["max_error"] <= attn_cases.TOLERANCE for row in record["rows"])
    assert all(row["attend_ms"]["median"] > 0 for row in record["rows"])
    assert record["interpreted"]["cases"] == 2
    assert {build["architecture"] for build in record["static"]["builds"]} == {"sm_90"}
    assert all(build["spills"] == 0 for build in record["static"]["builds"])
    assert {row["chip"] for row in record["static"]["launches"]} == {"H100 SXM", "H200"}


@without_gpu
@pytest.mark.usefixtures("few_cases")
def test_without_triton_the_reference_is_timed_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attn_cpu, "find_spec", lambda name: None)
    assert attn_mask.main(["--lengths", "5", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    assert "Triton is not installed" in text
    record = json.loads(text.splitlines()[-1])
    assert record["interpreted"] is record["static"] is None
    assert record["rows"]


def sees_every_earlier_row(*arguments: object, **options: object) -> torch.Tensor:
    """A causal mask in place of the tree's."""
    *tensors, layout = arguments
    return attend(*tensors, RowTree.chain(layout.num_rows), **options)


def leaks(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *rest, **options):
    """Looks at one entry of the cache that no row may see."""
    return attend(q, k_cache, v_cache, rest[0] + 1, rest[1], **options)


def drops_a_row(*arguments: object, **options: object) -> torch.Tensor:
    return attend(*arguments, **options)[:, 1:]


def is_slightly_off(*arguments: object, **options: object) -> torch.Tensor:
    out = attend(*arguments, **options)
    out[0, -1, -1, -1] += 1e-4
    return out


def is_off_in_triton(*arguments: object, implementation: str = "torch", **options: object):
    out = attend(*arguments, **options)
    return out + 1e-2 if implementation == "triton" else out


@without_gpu
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (sees_every_earlier_row, "attend at .*off by "),
        (leaks, "attend at .*off by nan"),
        (drops_a_row, "attend at .*expected shape "),
        (is_slightly_off, "attend at .*off by 0.0001"),
        (is_off_in_triton, "the Triton kernel at .*off by 0.01"),
    ],
)
def test_a_wrong_result_is_not_timed(
    operation: attn_cases.Attend, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if operation is is_off_in_triton:
        pytest.importorskip("triton", reason="Triton is not available for this platform")
    assert attn_mask.main(["--lengths", "5", "--repeats", "1"], operation) == 1
    captured = capsys.readouterr()
    assert "ratio" not in captured.out
    refusals = [line for line in captured.err.splitlines() if "refused: " in line]
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(refusals)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--lengths", "1,x"], "--lengths: expected numbers"),
        (["--peers", "sdpa,other"], "--peers: 'other' is not known, expected sdpa"),
        (["--architecture", "sm_1"], "--architecture: 'sm_1' is not known, expected sm_80"),
        (["--repeats", "0"], "expected a whole number of at least 1"),
        (["--json-out", "."], "--json-out"),
        (["--lengths", "64,99999999999"], "--lengths: expected at most 1048576, got 99999999999"),
        (["--architecture", ""], "--architecture: '' is not known"),
        (["--static", "--plot", "x.png"], "--plot does nothing beside --static"),
        (["--sweep", "--lengths", "8"], "--lengths does nothing beside --sweep"),
        (["--static", "--sweep"], "--sweep does nothing beside --static"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attn_mask.main(arguments) == 2
    assert_one_line(capsys, expected)


def test_plot_without_matplotlib_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attn_plot, "find_spec", lambda name: None)
    assert attn_mask.main(["--plot", "out.png"]) == 2
    assert_one_line(capsys, "--plot needs matplotlib")


def assert_one_line(capsys: pytest.CaptureFixture[str], expected: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err


# Figures


def test_figures_of_a_layer() -> None:
    """16,384 FLOPs for each key and row of 32 heads of 128, and in float32 32,768 bytes a key."""
    case = Case(Heads("", 32, 32, 128), (0, 2, 0), 1000)
    assert case.flops == 16_384 * 1001
    assert case.bytes_moved == 32_768 * 1001 + 2 * 32 * 128 * 4
    grouped = Case(Heads("", 32, 8, 128), (5, 4, 5), 0)
    seen = sum(map(sum, grouped.layout.visibility))
    assert grouped.flops == 16_384 * seen
    assert grouped.bytes_moved == 8_192 * 30 + 2 * 30 * 32 * 128 * 4
    halves = Case(Heads("", 32, 8, 128), (5, 4, 5), 0, batch=8, dtype=torch.bfloat16)
    assert halves.flops == 8 * grouped.flops
    assert halves.bytes_moved == 4 * grouped.bytes_moved


def test_the_limit_is_the_larger_of_bytes_and_arithmetic() -> None:
    """1,000 keys of 16 KB, and 2 x 2 x 32 x 128 FLOPs for each: bytes bind one row, not 120."""
    one_row = Case(Heads("", 32, 32, 128), (0, 2, 0), 999, dtype=torch.bfloat16)
    step = Case(Heads("", 32, 8, 128), (15, 5, 15), 4096, dtype=torch.bfloat16)
    chip = next(chip for chip in attn_static.CHIPS if chip.name == "H200")
    limits = attn_gpu.Limits(chip.gb_per_s * 1e9, chip.tflops * 1e12)
    for microseconds in (chip.microseconds, limits.microseconds):
        assert microseconds(one_row) == pytest.approx(16.4e6 / 4800e3, rel=1e-2)
        assert microseconds(step) == pytest.approx(step.flops / 989e6)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 3),  # 227 KB over 65 KB
        ({"shared": 0}, 3),  # 512 registers a lane over 168
        ({"shared": 0, "registers": 32}, 16),  # 64 warps over 4
        ({"shared": 0, "registers": 255, "warps": 8}, 1),
        ({"architecture": "gfx942", "registers": 178, "shared": 0}, 2),
        ({"architecture": "gfx942", "registers": 128, "shared": 40 * 1024}, 1),
    ],
)
def test_blocks_that_fit_on_a_processor(change: dict, expected: int) -> None:
    assert attn_static.blocks_per_processor(BUILD | change) == expected


def test_a_spread_of_tiles_proposes_the_fastest_that_always_runs() -> None:
    def row(tile: Tile, rows: int, us: float | None) -> dict:
        time = {"error": "out of resources"} if us is None else {"us": us}
        return {"head_dim": 128, "group": 1, "rows": rows, "length": 9, "tile": vars(tile)} | time

    slow, even, failing = Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(128, 64, 8, 2)
    times = [(slow, 1, 1.0), (slow, 120, 4.0), (even, 1, 1.5), (even, 120, 2.0)]
    rows = [row(*each) for each in times] + [row(failing, 1, 0.1), row(failing, 120, None)]
    assert attn_sweep.propose(rows) == {128: even}
    expected = '"sm_90": {\n    128: Tile(64, 32, 4, 2),\n},'
    assert attn_sweep.proposal("sm_90", {128: even}) == expected
    assert "out of resources" in attn_sweep.time_table(rows)
    assert attn_sweep.propose([row(failing, 1, None)]) == {}


def test_cases_on_a_gpu() -> None:
    cases = list(attn_gpu.cases(False, None))
    assert len(cases) == len(set(cases)) == 2 * 4 * 7 * 2
    assert {case.length for case in cases} == {512, 1024, 2048, 4096, 8192, 16384, 32768}
    quick = list(attn_gpu.cases(True, None))
    assert {case.length for case in quick} == {1024, 4096, 16384}
    assert {case.shape_name for case in quick} == {"AR", "(15, 5, 15)"}
    assert {case.batch for case in quick} == {1}


def test_rows_timed_on_a_gpu_become_a_table_and_panels() -> None:
    spread = {"median": 20.0, "p20": 19.0, "p80": 22.0}
    case = Case(attn_gpu.MODELS[0], (15, 5, 15), 1024, dtype=torch.bfloat16)
    rows = [
        case.to_dict()
        | {
            "max_error": 1e-3,
            "limit_us": 5.0,
            "fraction_of_limit": 0.25,
            "us": {"attend": spread, "sdpa": spread},
            "skipped": {"flashinfer": "flashinfer is not installed"},
        }
    ] * 2
    header, line, *_ = attn_gpu.table(rows).splitlines()
    assert "sdpa us" in header
    assert "25%" in line
    assert attn_gpu.reasons(rows) == ["flashinfer is not installed"]
    assert attn_plot.panels(rows[:1]) == {
        "MHA 32, (15, 5, 15), batch 1": {
            "attend": [(1024, 20.0)],
            "sdpa": [(1024, 20.0)],
            "limit": [(1024, 5.0)],
        }
    }


def test_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    case = Case(SMALL, (0, 2, 0), 128)
    times = {"attend_ms": {"median": 1.0}, "dense_ms": {"median": 2.0}}
    attn_plot.write([case.to_dict() | times], tmp_path / "out.png", "a processor")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# Binaries


def test_a_sweep_reports_each_candidate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="Triton is not available for this platform")
    monkeypatch.setattr(attn_gpu, "find_timer", lambda: None)
    monkeypatch.setattr(attn_sweep, "CANDIDATES", (Tile(64, 64, 4, 2),))
    assert attn_mask.main(["--sweep", "--quick", "--architecture", "sm_80"]) == 0
    text = capsys.readouterr().out
    record = json.loads(text.splitlines()[-1])
    builds = record["sweep"]["builds"]
    assert len(builds) == 2 * len(attn_sweep.GROUPS)
    assert text.count("in use") == len(attn_sweep.GROUPS)
    assert all(math.isfinite(build["registers"]) for build in builds)


def test_a_build_that_fails_says_why() -> None:
    pytest.importorskip("triton", reason="Triton is not available for this platform")
    from ahead_of_time import BuildError, Request, build_all

    impossible = Request("sm_90", "bf16", 64, 4, 4, False, tile=Tile(48, 64, 4, 2))
    (report,) = build_all([impossible])
    assert "error" in report
    assert report["error"] in attn_static.build_table([report])
    with pytest.raises(BuildError, match="exit code 1"):
        list(build_all([Request("other", "bf16", 64, 4, 4, False)]))


def test_static_report_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn_static, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs Triton"):
        attn_static.build(["sm_90"])
