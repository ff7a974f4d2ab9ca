"""`bench/decode.py --profile`: what is counted as what, and that clocks change no text."""

import ast
import inspect
import json
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import write_tiny_checkpoint
from tiny_models import one_thread
from torch.autograd import DeviceType

from lookahead import Engine, InputError, LookaheadConfig
from lookahead.config import SamplingConfig
from lookahead.models import forward_numba
from lookahead.models.forward_ops import OpsForward

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import decode
import profile_numba
import profile_ops
import profile_step
from decode_modes import Job
from timing import Prompt

LAYERS = 2
CONFIG = LookaheadConfig(4, 3, 2)
SAMPLING = SamplingConfig()
# What a phase of `run_forward` calls, and the part that it counts as.
CALLS = {
    "_embed_row": "rest",
    "multiply_share": "products",
    "write_row": "rest",
    "_attend_share": "attention",
    "gate_row": "rest",
    "_norm_share": "norm",
    "store": "rest",
    "_gather_rows": "rest",
}
HEAD = {"multiply_share", "_largest_of_share"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("profile") / "checkpoint")


def load(checkpoint: Path, implementation: str = "auto") -> Engine:
    return Engine.load(
        checkpoint, device="cpu", dtype="float32", max_length=128, implementation=implementation
    )


def called_between_meetings(body: list[ast.stmt]) -> list[list[str]]:
    """The names called before each meeting of some statements."""
    phases: list[list[str]] = [[]]
    for statement in body:
        calls = [node.func.id for node in ast.walk(statement) if is_call(node)]
        if {"meet", "meet_and_ask"} & set(calls):
            phases.append([])
        else:
            phases[-1] += [name for name in calls if name in CALLS or name in HEAD]
    return phases


def is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_phases_are_those_of_the_forward_pass() -> None:
    source = textwrap.dedent(inspect.getsource(forward_numba.run_forward.py_func))
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    loop = next(
        statement
        for statement in function.body
        if isinstance(statement, ast.For) and "multiply_share" in ast.unparse(statement)
    )
    before = function.body[: function.body.index(loop)]
    behind = function.body[function.body.index(loop) + 1 :]
    layer = called_between_meetings(loop.body)
    assert layer.pop() == []
    assert [[CALLS[name] for name in names] for names in layer] == [
        [part] for part in profile_numba.LAYER_PHASES
    ]
    found, first, rest = called_between_meetings(before)
    assert (found, first, rest) == ([], ["_embed_row", "_norm_share"], [])
    gathering, head, nothing = called_between_meetings(behind)
    assert ([CALLS[name] for name in gathering], nothing) == (["rest", "rest"], [])
    assert set(head) == HEAD
    assert profile_numba.LAST_PHASES == ("rest", "head + argmax")
    assert profile_numba.phases(9 * LAYERS + 4) == (
        "rest", *profile_numba.LAYER_PHASES, *profile_numba.LAYER_PHASES, "rest", "head + argmax",
    )  # fmt: skip
    with pytest.raises(AssertionError, match="21 meetings"):
        profile_numba.phases(21)


def test_clocks_see_every_phase_and_change_nothing(checkpoint: Path) -> None:
    engine = load(checkpoint)
    with one_thread():
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            expected = engine.generate("abc abc", max_new_tokens=24, lookahead=CONFIG)
            began = time.perf_counter()
            with profile_numba.forward_phases(num_threads) as seconds:
                result = engine.generate("abc abc", max_new_tokens=24, lookahead=CONFIG)
            spent = time.perf_counter() - began
            assert (result.token_ids, result.steps) == (expected.token_ids, expected.steps)
            assert set(seconds) == {"products", "attention", "norm", "rest", "head + argmax"}
            assert min(seconds.values()) > 0
            assert sum(seconds.values()) < spent


def test_operations_are_counted_as_what_they_are(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(checkpoint, "torch")
    logits, pause = OpsForward.logits, 0.01

    def slow_logits(forward: OpsForward, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(pause)
        return logits(forward, hidden)

    monkeypatch.setattr(OpsForward, "logits", slow_logits)
    with one_thread(), profile_ops.operation_times(engine.model) as seconds:
        result = engine.generate("abc abc", max_new_tokens=8, lookahead=CONFIG)
    assert set(seconds) == {"products", "attention", "norm", "rest", "head + argmax"}
    assert seconds["head + argmax"] >= result.steps * pause
    assert seconds["products"] > 0
    # The head's product, slow as it was made, is in its own part and not among the others.
    assert sum(seconds.values()) < result.prefill_seconds + result.decode_seconds


def test_kernels_on_a_gpu_are_counted_once() -> None:
    """Events as torch's profiler has them: ranges on both sides, kernels on the device's."""

    def event(name: str, on_gpu: bool, microseconds: float, parent: object = None) -> object:
        side = DeviceType.CUDA if on_gpu else DeviceType.CPU
        return SimpleNamespace(
            name=name,
            device_type=side,
            device_time_total=microseconds,
            cpu_time_total=7.0,
            cpu_parent=parent,
        )

    prefix = profile_ops.PREFIX
    head = event(f"{prefix}head + argmax", False, 30.0)
    events = [
        event(f"{prefix}attention", False, 20.0),
        head,
        event(f"{prefix}products", False, 30.0, event("aten::linear", False, 30.0, head)),
        event(f"{prefix}attention", True, 25.0),
        event("attend_tiles", True, 20.0),
        event("gemm", True, 30.0),
        event("embedding", True, 5.0),
    ]
    found = profile_ops.seconds_by_group(events, is_gpu=True)
    assert found == pytest.approx({"attention": 20e-6, "head + argmax": 30e-6, "rest": 5e-6})
    assert profile_ops.seconds_by_group(events[:3], is_gpu=False) == pytest.approx(
        {"attention": 7e-6, "head + argmax": 7e-6}
    )


@pytest.mark.parametrize(
    ("seen", "expected"), [({}, "saw no products"), ({"products": 1.0}, "saw no attention")]
)
def test_a_step_that_does_not_show_its_operations_is_refused(
    seen: dict[str, float], expected: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(checkpoint, "torch")
    job = Job(Prompt("a", None, "abc abc", False), engine.tokenizer.encode("abc abc"))
    monkeypatch.setattr(profile_ops, "seconds_by_group", lambda *_: Counter(seen))
    with one_thread(), pytest.raises(InputError, match=expected):
        profile_step.measure(engine, [CONFIG], [job], 4, 1, SAMPLING)


@pytest.mark.parametrize("implementation", ["numba", "torch"])
def test_parts_of_a_step_add_up(checkpoint: Path, implementation: str) -> None:
    engine = load(checkpoint, implementation)
    job = Job(Prompt("a", None, "abc abc", False), engine.tokenizer.encode("abc abc"))
    with one_thread():
        configs = [CONFIG, engine.tuning.config]
        plain, drafting, tuned = profile_step.measure(engine, configs, [job], 16, 2, SAMPLING)
    assert (plain["mode"], plain["rows"], plain["steps"]) == ("autoregressive", 1, 2 * 15)
    # Lengths 6..21, the first step's too.
    assert plain["length"] == 6 + 7.5
    assert (drafting["window"], drafting["ngram"], drafting["guesses"]) == (4, 3, 2)
    assert 8 <= drafting["rows"] <= 12
    assert (tuned["mode"], tuned["window"], tuned["guesses"]) == ("tuned", 0, 4)
    for row in (plain, drafting, tuned):
        assert set(row["ms"]) == set(profile_step.PARTS)
        assert min(row["ms"].values()) > 0
        assert sum(row["ms"].values()) == pytest.approx(row["ms_with_clocks"])
        assert sum(row["percent"].values()) == pytest.approx(100)


def test_decode_profiles(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc abc"}\n')
    arguments = ["--ckpt", str(checkpoint), "--prompts", str(prompts), "--profile"]
    arguments += ["--dtype", "float32", "--configs", "4,3,2", "--repeats", "1"]
    assert decode.main([*arguments, "--max-new-tokens", "8"]) == 0
    text = capsys.readouterr().out
    record = json.loads(text.splitlines()[-1])
    assert (record["benchmark"], record["implementation"]) == ("profile", "numba")
    assert [row["mode"] for row in record["rows"]] == ["autoregressive", "tuned", "lookahead"]
    assert text.splitlines()[2].split()[:5] == ["step", "rows", "length", "ms/step", "with"]
    # One new token comes with the first step, which is left out.
    assert decode.main([*arguments, "--max-new-tokens", "1"]) == 2
    assert capsys.readouterr().err == (
        "error: --profile needs steps behind the first: take more --max-new-tokens\n"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--steps-only"], "--steps-only times nothing"),
        (
            ["--peers", "transformers"],
            "--profile looks at the engine's own steps: leave out --peers",
        ),
    ],
)
def test_profile_refuses_what_does_not_go_with_it(
    checkpoint: Path, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decode.main(["--ckpt", str(checkpoint), "--profile", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error
