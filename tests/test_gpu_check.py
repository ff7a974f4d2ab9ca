"""The one command for a machine with a GPU: what it makes of its parts, whatever became of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import gpu_report
import replay
import sampling

BENCH = Path(gpu_report.__file__).parent
TESTS = """<testsuites><testsuite>
<testcase classname="a" name="right"/>
<testcase classname="a" name="wrong"><failure message="off by one">...</failure></testcase>
<testcase classname="a" name="absent"><skipped message="no such thing"/></testcase>
</testsuite></testsuites>"""


def report(
    directory: Path, monkeypatch: pytest.MonkeyPatch, gpu: str | None = "a GPU"
) -> tuple[int, dict]:
    monkeypatch.setattr(gpu_report, "provenance", lambda: {"gpu": gpu})
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", str(directory)])
    code = gpu_report.main()
    return code, json.loads((directory / "gpu_check.json").read_text())


def write_parts(directory: Path, *parts: tuple[str, int]) -> None:
    lines = [
        f"{name}\t{code}\t3\t60\t{2 * number + 2}\n" for number, (name, code) in enumerate(parts)
    ]
    log = [f"== {name}\n{name} ended with {code}\n" for name, code in parts]
    (directory / "log.txt").write_text("".join(log))
    (directory / "parts.tsv").write_text("".join(lines))


def test_parts_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parts(tmp_path, ("tests", 0), ("attn_mask", 0))
    (tmp_path / "tests.xml").write_text(TESTS)
    (tmp_path / "attn_mask.json").write_text('{"rows": []}\n')
    code, record = report(tmp_path, monkeypatch)
    assert code == 0
    assert record["gpu_found"] is True
    tests, attention = record["parts"]
    assert (tests["result"]["passed"], tests["result"]["failed"]) == (1, 1)
    assert tests["result"]["failures"] == ["a.wrong: off by one"]
    assert tests["result"]["reasons_to_skip"] == ["no such thing"]
    assert attention["result"] == {"rows": []}
    assert attention["seconds"] == 3


def test_parts_that_failed_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of time with half a file, and ended before there was one."""
    write_parts(tmp_path, ("tests", 124), ("attn_mask", 1), ("decode", 2))
    (tmp_path / "tests.xml").write_text(TESTS[:40])
    (tmp_path / "attn_mask.json").write_text('{"rows": [')
    code, record = report(tmp_path, monkeypatch)
    assert code == 1
    assert record["failed"] == ["tests", "attn_mask", "decode"]
    assert [part["timed_out"] for part in record["parts"]] == [True, False, False]
    last = [part["last_lines"][-1] for part in record["parts"]]
    assert last == ["tests ended with 124", "attn_mask ended with 1", "decode ended with 2"]
    assert all(part["result"] is None for part in record["parts"])


def test_tests_that_were_all_skipped_showed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(tmp_path, ("tests", 0))
    (tmp_path / "tests.xml").write_text("<testsuites/>")
    assert report(tmp_path, monkeypatch)[0] == 1


def test_no_gpu_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parts(tmp_path)
    code, record = report(tmp_path, monkeypatch, gpu=None)
    assert code == 1
    assert record["gpu_found"] is False
    assert "no GPU was found" in capsys.readouterr().out


def test_a_python_without_the_package_still_leaves_a_report(tmp_path: Path) -> None:
    write_parts(tmp_path, ("tests", 1))
    command = [sys.executable, "-S", "-E", str(BENCH / "gpu_report.py"), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    record = json.loads((tmp_path / "gpu_check.json").read_text())
    assert record["failed"] == ["tests"]
    assert "error" in record["provenance"]


def test_a_replay_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parts(tmp_path, ("replay_7b", 0), ("replay_smollm2", 1))
    names = ("window", "ngram", "guesses", "tokens_per_step")
    rows = [
        {**dict(zip(names, values, strict=True)), "ratio": {"median": ratio}}
        for values, ratio in (((None, None, None, 1.0), 1.0), ((15, 5, 15, 1.9), 1.7))
    ]
    result = {
        "benchmark": "replay",
        "acceptance": "replayed acceptance",
        "shape": "llama-2-7b",
        "rows": rows,
        "cost": {"share_of_copy_speed": 0.456},
    }
    (tmp_path / "replay_7b.json").write_text(json.dumps(result))
    code, record = report(tmp_path, monkeypatch)
    assert code == 1
    assert record["failed"] == ["replay_smollm2", "tests"]  # there were none
    assert [part["result"] for part in record["parts"]] == [result, None]
    assert capsys.readouterr().out.splitlines()[:4] == [
        "replay_7b: exit code 0 after 3 s",
        "  llama-2-7b, replayed acceptance: (15, 5, 15) 1.70 x AR, 1.90 tokens a step",
        "  llama-2-7b: AR reads at 46% of the speed of copying",
        "replay_smollm2: exit code 1 after 3 s",
    ]


def test_all_parts_fit_into_eight_minutes() -> None:
    script = (BENCH / "gpu_check.sh").read_text()
    limits = re.findall(r"^ *(?:part|replay) [a-z0-9_]+ (\d+) ", script, re.MULTILINE)
    assert len(limits) == 7
    assert sum(map(int, limits)) <= 480


def test_every_command_of_the_script_is_one_that_exists(tmp_path: Path) -> None:
    """Run with an interpreter that only notes what it is asked to run."""
    noted = tmp_path / "noted"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {noted}\n')
    fake.chmod(0o755)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    subprocess.run(
        [BENCH / "gpu_check.sh", tmp_path / "out", checkpoint],
        env={**os.environ, "PYTHON": str(fake)},
        capture_output=True,
        check=True,
    )
    out = tmp_path / "out"
    commands = noted.read_text().splitlines()
    assert [command.split()[0] for command in commands] == [
        "-m",
        "bench/attn_mask.py",
        "bench/sampling.py",
        "bench/replay.py",
        "bench/replay.py",
        "bench/decode.py",
        "bench/exactness.py",
        "bench/gpu_report.py",
    ]
    assert (
        f"--shape llama-2-7b --configs 15,5,15 --limit 2 --repeats 1 --json-out {out}/replay_7b.json"
        in commands[3]
    )
    parsed = replay.build_parser().parse_args(commands[4].split()[1:])
    assert (parsed.shape, parsed.json_out) == ("smollm2-135m", out / "replay_smollm2.json")
    assert parsed.replay == Path("bench/trace.json")
    assert "tests/kernels/test_gpu_draw.py" in commands[0]
    sampling.build_parser().parse_args(commands[2].split()[1:])


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    run = subprocess.run([BENCH / "gpu_check.sh", *arguments], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("usage: ")
