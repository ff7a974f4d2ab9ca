"""The attention benchmark as it runs on a GPU, with the GPU left out: what is timed beside the kernel,
what is refused, what is proposed, and the count of rows that break the contract."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from lookahead.kernels.attn_mask import attend
from lookahead.kernels.tuning import Tile
from lookahead.layout import RowTree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import attn_cases
import attn_contract
import attn_gpu
import attn_mask
import attn_peers
import attn_sweep
import timing
from attn_cases import Case, Heads

# As in tests/kernels: the interpreter is chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

CPU = torch.device("cpu")
SMALL = Heads("GQA 4:2", 4, 2, 16)


def sees_every_earlier_row(*arguments: object, **options: object) -> torch.Tensor:
    """A causal mask in place of the tree's."""
    *tensors, layout = arguments
    return attend(*tensors, RowTree.chain(layout.num_rows), **options)


def is_off_in_triton(*arguments: object, implementation: str = "torch", **options: object):
    out = attend(*arguments, **options)
    return out + 1e-2 if implementation == "triton" else out


class HostTimer:
    """Stands in for a GPU's timer: runs everything once on the CPU."""

    device = CPU
    name = "no GPU at all"

    def times(self, calls: attn_gpu.Calls, repeats: int) -> dict[str, timing.Spread]:
        for call in calls.values():
            call()
        return {name: timing.spread([10.0 + place]) for place, name in enumerate(calls)}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the GPU, at sizes and in a dtype that the interpreter can do."""
    pytest.importorskip("triton", reason="Triton is not available for this platform")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    def flex(case: Case, inputs: attn_cases.Inputs) -> attn_peers.Peer:
        return attn_peers.flex(case, inputs, compiled=False)

    monkeypatch.setattr(attn_gpu, "find_timer", HostTimer)
    monkeypatch.setattr(attn_gpu, "capture", lambda call: (call, call()))
    monkeypatch.setattr(attn_gpu, "DTYPE", torch.float16)
    monkeypatch.setattr(attn_gpu, "MODELS", (SMALL,))
    monkeypatch.setattr(attn_gpu, "COPY_BYTES", 1000)
    monkeypatch.setattr(attn_gpu, "MATMUL_SIZE", 8)
    monkeypatch.setattr(attn_contract, "SHAPE", (1, 2, 1))
    monkeypatch.setattr(attn_contract, "LENGTHS", (5,))
    monkeypatch.setitem(attn_peers.PEERS, "flex", flex)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_kernel_is_timed_beside_its_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert attn_mask.main(["--quick", "--lengths", "70", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    assert "nothing was timed" not in text
    record = json.loads(text.splitlines()[-1])
    assert record["timed_on_gpu"] is True
    assert record["cases_left_out"] == 0
    assert [row["rows"] for row in record["rows"]] == [120, 1]
    assert record["contract"]["rows"] == 2
    for row in record["rows"]:
        assert row["us"]["attend"]["median"] == 10.0
        assert row["fraction_of_limit"] == pytest.approx(row["limit_us"] / 10.0)
        assert row["us"].keys() | row["skipped"].keys() == {"attend", *attn_peers.PEERS}
        assert {"sdpa", "flex"} <= row["us"].keys()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_kernel_that_is_wrong_is_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--lengths", "70", "--repeats", "1"]
    assert attn_mask.main(arguments, is_off_in_triton) == 1
    captured = capsys.readouterr()
    assert "refused: attend at GQA 4:2" in captured.err
    assert captured.out == ""


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_peer_that_is_wrong_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(case: Case, inputs: attn_cases.Inputs) -> attn_peers.Peer:
        return attn_peers.Peer(lambda: inputs.q, lambda out: out)

    monkeypatch.setitem(attn_peers.PEERS, "flex", wrong)
    arguments = ["--quick", "--lengths", "70", "--peers", "flex", "--seconds", "60"]
    assert attn_mask.main(arguments) == 0
    text = capsys.readouterr().out
    assert "left out: flex at GQA 4:2" in text
    assert all(row["us"].keys() == {"attend"} for row in json.loads(text.splitlines()[-1])["rows"])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_tiles_are_timed_and_the_fastest_is_proposed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attn_sweep, "CANDIDATES", (Tile(64, 32, 4, 1), Tile(48, 64, 4, 1)))
    monkeypatch.setattr(attn_sweep, "HEAD_DIMS", (16,))
    monkeypatch.setattr(attn_sweep, "NUM_Q_HEADS", 4)
    monkeypatch.setattr(attn_sweep, "LENGTHS", (40,))
    monkeypatch.setattr(attn_sweep, "SHAPES", ((1, 3, 1),))
    assert attn_mask.main(["--sweep"]) == 0
    text = capsys.readouterr().out
    sweep = json.loads(text.splitlines()[-1])["sweep"]
    assert sweep["architecture"] == "cpu"
    assert sweep["proposed"] == {"16": vars(Tile(64, 64, 4, 1))}
    assert "16: Tile(64, 64, 4, 1)," in text
    failed = [row for row in sweep["times"] if "error" in row]
    assert len(sweep["times"]) == 3 * len(failed) == 3 * 4
    assert {row["tile"]["block_m"] for row in failed} == {48}


# Peers and contract


@pytest.mark.parametrize("shape", [(0, 2, 0), (5, 4, 5), (15, 5, 15)])
@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_peers_compute_the_same_attention(
    name: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_compiler(case: Case, inputs: attn_cases.Inputs) -> attn_peers.Peer:
        return attn_peers.flex(case, inputs, compiled=False)

    monkeypatch.setitem(attn_peers.PEERS, "flex", without_compiler)
    case = Case(SMALL, shape, 77, batch=2)
    inputs = attn_cases.make_inputs(case)
    _, out = attn_peers.prepare(name, case, inputs)
    attn_cases.check(name, case, out, attn_cases.expect(inputs))


def test_a_peer_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: Case, inputs: attn_cases.Inputs) -> attn_peers.Peer:
        raise RuntimeError("no\ncompiler")

    case = Case(SMALL, (0, 2, 0), 3)
    inputs = attn_cases.make_inputs(case)
    monkeypatch.setitem(attn_peers.PEERS, "flex", fails)
    with pytest.raises(attn_peers.Skipped, match="flex cannot run: RuntimeError: no compiler"):
        attn_peers.prepare("flex", case, inputs)
    monkeypatch.setattr(attn_peers, "find_spec", lambda name: None)
    with pytest.raises(attn_peers.Skipped, match="flashinfer is not installed"):
        attn_peers.prepare("flashinfer", case, inputs)


@pytest.mark.parametrize("length", [0, 1000])
def test_16_bit_results_are_held_to_16_bits(length: int) -> None:
    """A result rounded once passes; one that missed a key does not, however long the context."""
    case = Case(SMALL, (5, 4, 5), length, dtype=torch.float16)
    inputs = attn_cases.make_inputs(case)
    expected = attn_cases.expect(inputs)
    attn_cases.check("rounded", case, expected.values.half(), expected)
    wrong = inputs.call(sees_every_earlier_row, case.layout)()
    with pytest.raises(attn_cases.WrongResult):
        attn_cases.check("causal", case, wrong, expected, attn_peers.SLACK)


def test_contract_counts_rows_that_differ() -> None:
    case = Case(SMALL, (3, 4, 2), 21)

    def by_value(q: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        return q

    def by_step(q: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        return q + q.shape[1]

    assert attn_contract.compare_rows(case, by_value, CPU) == (0, 8)
    assert attn_contract.compare_rows(case, by_step, CPU) == (8, 8)


def test_a_row_alone_computes_what_it_computes_in_the_step() -> None:
    case = Case(SMALL, (3, 4, 2), 21)
    inputs = attn_cases.make_inputs(case)
    together = inputs.call(attend, case.layout)()
    for path in case.layout.candidate_paths:
        for depth, row in enumerate(path):
            alone = attn_contract.alone(inputs, path, depth)
            out = alone.call(attend, RowTree([-1]))()
            torch.testing.assert_close(out[:, 0], together[:, row])
