"""`bench/replay.py`: a replay takes the recorded steps and no others, on a model that really runs."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import write_tiny_checkpoint
from tiny_models import one_thread
from torch.autograd import DeviceType

from lookahead import Engine, LookaheadConfig
from lookahead.config import AUTOREGRESSIVE
from lookahead.models.llama import Llama

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import replay
import replay_cost
import shapes
import trace_model
import trace_record
from decode_modes import Job
from timing import Prompt
from trace_file import RecordedPrompt, RecordedRun, Trace, read_trace, write_trace

CPU = torch.device("cpu")
CONFIG = LookaheadConfig(4, 3, 2)
SMALL = Trace(
    11,
    {"checkpoint": "none"},
    [
        RecordedPrompt(
            "a",
            None,
            [1, 2],
            [
                RecordedRun(AUTOREGRESSIVE, [3, 2**31 - 1], [5, 6], [[3], [4]]),
                RecordedRun(CONFIG, [3, 4], [2**31 - 1], [[3, 0, 9]]),
            ],
        )
    ],
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, prompts, and what was recorded of them."""
    path = tmp_path_factory.mktemp("replay")
    write_tiny_checkpoint(path / "checkpoint")
    lines = [{"id": "first", "prompt": "abc abc"}, {"id": "second", "prompt": "a bad cab"}]
    (path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--record", str(path / "trace.json"), "--ckpt", str(path / "checkpoint")]
    arguments += ["--prompts", str(path / "prompts.jsonl"), "--dtype", "float32"]
    arguments += ["--max-new-tokens", "40", "--configs", "4,3,2;5,4,5"]
    with one_thread():
        assert replay.main(arguments) == 0
    return path


def run(*options: str) -> int:
    with one_thread():
        return replay.main([*options, "--shape", "tiny", "--dtype", "float32", "--repeats", "1"])


def test_a_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    write_trace(SMALL, tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == SMALL
    assert SMALL.configs == [AUTOREGRESSIVE, CONFIG]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read as JSON"),
        (lambda text: text.replace('"vocab_size": 11', '"vocab_size": 12'), "is damaged"),
        (lambda text: text.replace('"answers": "eN', '"answers": "eO'), "is damaged"),
        (lambda text: text.replace("version 1", "version 2"), "expected a file of --record"),
        (lambda text: "{}", "expected a file of --record"),
        (lambda text: "[]", "must hold a JSON object"),
    ],
)
def test_a_damaged_trace_is_refused_in_one_line(
    damage, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    write_trace(SMALL, path)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    assert run("--replay", str(path)) == 2
    assert_one_line(capsys, expected)


def assert_one_line(capsys: pytest.CaptureFixture[str], expected: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err


def test_a_replay_takes_the_recorded_steps(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = []
    choose = Llama.choose
    monkeypatch.setattr(Llama, "choose", lambda *given: passes.append(0) or choose(*given))
    assert run("--replay", str(directory / "trace.json")) == 0
    text, progress = capsys.readouterr()
    assert progress == ""
    assert text.startswith("replayed acceptance: choices of checkpoint")
    assert "vocabulary enlarged from 256 to 257 for the recorded ids" in text
    record = json.loads(text.splitlines()[-1])
    trace = read_trace(directory / "trace.json")
    assert (record["acceptance"], record["shape"]) == ("replayed acceptance", "tiny")
    assert record["vocab_size"] == 257
    for place, row in enumerate(record["rows"]):
        runs = [prompt.runs[place] for prompt in trace.prompts]
        assert [prompt["steps"] for prompt in row["prompts"]] == [run.steps for run in runs]
        assert [prompt["new_tokens"] for prompt in row["prompts"]] == [40, 40]
        assert row["identical_prompts"] == 2
        assert row["tokens"] == row["steps"] + sum(row["accepted"].values())
    assert record["rows"][0]["steps"] == 80
    assert min(row["steps"] for row in record["rows"][1:]) < 80
    # The model ran for every step: checked once, warmed up on part of a prompt, timed once.
    assert len(passes) > 2 * sum(row["steps"] for row in record["rows"])
    assert record["cost"]["launches"] is None
    assert record["cost"]["share_of_copy_speed"] > 0


def test_configurations_are_chosen(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(directory / "trace.json")
    assert run("--replay", trace, "--configs", "5,4,5", "--limit", "1") == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["window"] for row in record["rows"]] == [None, 5]
    assert record["prompts"] == 1
    assert run("--replay", trace, "--configs", "5,5,5") == 2
    assert_one_line(capsys, "5,5,5 was not recorded, expected some of 4,3,2;5,4,5")


@pytest.mark.parametrize("place", [0, 1])
def test_a_replay_that_leaves_the_recording_is_refused(
    place: int, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One answer of one step is another: the next step's current token, or its window, differs."""
    trace = read_trace(directory / "trace.json")
    recorded = trace.prompts[1].runs[place]
    answers = [list(row) for row in recorded.answers]
    answers[7][place] ^= 1  # the current token's, or that of the window's first column
    runs = list(trace.prompts[1].runs)
    runs[place] = replace(recorded, answers=answers)
    prompts = [trace.prompts[0], replace(trace.prompts[1], runs=runs)]
    write_trace(replace(trace, prompts=prompts), tmp_path / "other.json")
    assert run("--replay", str(tmp_path / "other.json")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "refused: step 8 has other rows than the recorded one; nothing is reported\n"
    )


class FakeModel:
    """Chooses at each row the row's number."""

    device = CPU

    def choose(self, *given: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = given[6]
        return torch.zeros(len(rows), 7), rows, rows >= 0


def choose(model, *, live: int = 6, more: int = 0):
    """What a model or a watcher chooses at rows 0, 2, 3, 4, 5 and 7, of which so many are live."""
    tokens = torch.arange(8)[None] + more
    given = (tokens, None, None, None, torch.tensor([9 + more]), torch.tensor([live]))
    return model.choose(*given, torch.tensor([0, 2, 3, 4, 5, 7]))


def test_rows_that_are_dead_have_no_answers() -> None:
    model = FakeModel()
    recorder = trace_model.Recorder(model)
    with trace_model.watched(model, recorder):
        assert choose(model)[1].tolist() == [0, 2, 3, 4, 5, 7]
        choose(model, live=4)
    choose(model)  # nobody watches any more
    assert recorder.answers == [[0, 2, 3, 4, 5], [0, 2, 3]]


def test_checks_tell_steps_apart() -> None:
    tokens, live, length = torch.arange(8)[None], torch.tensor([6]), torch.tensor([9])
    check = trace_model.check_of(tokens, length, live)
    assert trace_model.check_of(tokens[:, :6], length, live) == check  # a smaller layout
    assert trace_model.check_of(tokens, length, live - 1) != check
    assert trace_model.check_of(tokens, length + 1, live) != check
    assert trace_model.check_of(tokens + 1, length, live) != check


def test_recorded_tokens_are_given() -> None:
    recorder = trace_model.Recorder(FakeModel())
    choose(recorder)
    choose(recorder, more=1)
    run = RecordedRun(CONFIG, [], recorder.checks, [[3, 6, 1, 1, 2], [1, 2, 5]])
    forcer = trace_model.Forcer(FakeModel(), [run], most_logits=6)
    for is_checked in (True, False):  # begun anew, it is at the first step again
        forcer.begin(run, is_checked)
        logits, tokens, finite = choose(forcer)
        assert tokens.tolist() == [3, 6, 1, 1, 2, 0]
        assert (tuple(logits.shape), finite.tolist()) == ((6, 7), [True] * 6)
        assert choose(forcer, more=1)[1].tolist()[:3] == [1, 2, 5]
    forcer.begin(run, is_checked=True)
    with pytest.raises(trace_model.RowsDiffer, match="step 0 has other rows"):
        choose(forcer, more=1)


def test_prompts_are_lengthened_by_the_others() -> None:
    jobs = [Job(Prompt(name, None, name, False), ids) for name, ids in (("a", [1, 2]), ("b", [3]))]
    assert [job.token_ids for job in trace_record.lengthened(jobs, 1)] == [[1, 2], [3]]
    assert [job.token_ids for job in trace_record.lengthened(jobs, 4)] == [
        [3, 3, 1, 2],
        [2, 1, 2, 3],
    ]
    assert trace_record.lengthened(jobs[:1], 3)[0].token_ids == [2, 1, 2]


def test_bytes_that_a_step_reads() -> None:
    # Two layers of 4 and 2 heads of 8: 32 * 64 + 32 * 32 + 3 * 32 * 64 numbers and two norms.
    layer = 32 * 64 + 32 * 32 + 3 * 32 * 64 + 2 * 32
    cache = 2 * 2 * 2 * 8 * 10
    numbers = 2 * layer + 32 + 256 * 32 + cache
    tiny = shapes.SHAPES["tiny"]
    assert replay_cost.read_bytes(tiny, torch.float32, 10) == 4 * numbers
    tied = replace(tiny, tie_word_embeddings=True)
    assert replay_cost.read_bytes(tied, torch.float32, 10) == 4 * numbers


def test_launches_are_counted() -> None:
    events = [
        SimpleNamespace(name=name, device_type=device)
        for name, device in (
            ("attend_tiles", DeviceType.CUDA),
            ("nvjet_gemm", DeviceType.CUDA),
            ("Memcpy DtoD (Device -> Device)", DeviceType.CUDA),
            ("cudaLaunchKernelExC", DeviceType.CPU),
            ("cuLaunchKernelEx", DeviceType.CPU),
            ("cudaGraphLaunch", DeviceType.CPU),
            ("aten::linear", DeviceType.CPU),
        )
    ]
    assert replay_cost.count_launches(events) == (2, 3)


def test_random_weights_are_the_same_each_time() -> None:
    first, second = (
        shapes.random_engine(shapes.SHAPES["tiny"], torch.float32, CPU, 64, step_rows=16)
        for _ in range(2)
    )
    ids = [each.generate([1, 2, 3], max_new_tokens=8).token_ids for each in (first, second)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--replay", "nowhere.json"], "nowhere.json cannot be read as JSON"),
        (
            ["--replay", "TRACE", "--shape", "giant"],
            "--shape 'giant' is not known, expected llama-2",
        ),
        (["--record", "out.json"], "--record needs a model to record: give --ckpt"),
        (["--record", "a", "--replay", "b"], "not allowed with"),
        ([], "one of the arguments --record --replay is required"),
        (["--record", ".", "--ckpt", "CKPT"], "--record . cannot be written"),
        (
            ["--record", "out.json", "--ckpt", "CKPT", "--max-new-tokens", "512"],
            "positions, the model has 512",
        ),
    ],
)
def test_replay_refuses_wrong_input_in_one_line(
    options: list[str],
    expected: str,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"TRACE": str(directory / "trace.json"), "CKPT": str(directory / "checkpoint")}
    assert replay.main([names.get(word, word) for word in options]) == 2
    assert_one_line(capsys, expected)
    assert not list(tmp_path.iterdir())


def test_ids_that_differ_are_not_recorded(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    generate = Engine.generate

    def differing(engine: Engine, ids: list[int], **options: object) -> object:
        result = generate(engine, ids, **options)
        if result.window:
            return replace(result, token_ids=[*result.token_ids[:-1], 0])
        return result

    monkeypatch.setattr(Engine, "generate", differing)
    arguments = ["--record", str(tmp_path / "t.json"), "--ckpt", str(directory / "checkpoint")]
    arguments += ["--prompts", str(directory / "prompts.jsonl"), "--max-new-tokens", "8"]
    assert replay.main([*arguments, "--dtype", "float32"]) == 1
    assert "prompt first differs from autoregressive decoding at new token 7" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "t.json").exists()


def test_the_trace_that_comes_along_can_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    """If not, drafting has changed since: record it anew, with the options that `source` names."""
    assert run("--replay", str(Path(replay.__file__).parent / "trace.json"), "--limit", "1") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["vocab_size"] == 49152


def test_the_trace_that_comes_along_is_whole() -> None:
    trace = read_trace(Path(replay.__file__).parent / "trace.json")
    assert (trace.vocab_size, len(trace.prompts)) == (49152, 3)
    assert (15, 5, 15) in [(each.window, each.ngram, each.guesses) for each in trace.configs]
    for prompt in trace.prompts:
        assert 900 <= len(prompt.token_ids) < 1100
        assert len({tuple(run.token_ids) for run in prompt.runs}) == 1
