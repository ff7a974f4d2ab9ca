"""The attention kernel on a GPU, beside its peers: checked, then timed in turn with a cold cache.

What is timed is a replay of a captured graph, as in decoding: the host's own time does not count.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import attn_peers
import timing
import torch
from attn_cases import (
    AUTOREGRESSIVE,
    SHAPES,
    Attend,
    Case,
    Heads,
    WrongResult,
    check,
    expect,
    make_inputs,
)
from tqdm import tqdm

DEFAULT_LENGTHS = tuple(512 << doubling for doubling in range(7))
QUICK_LENGTHS = (1024, 4096, 16384)
DEFAULT_REPEATS = 30
DTYPE = torch.bfloat16
MODELS = (Heads("MHA 32", 32, 32, 128), Heads("GQA 32:8", 32, 8, 128))
# Written between two runs so that neither finds its inputs in the L2 cache; several times its size.
FLUSH_FACTOR = 4
LEAST_FLUSH_BYTES = 256 * 2**20
COPY_BYTES = 2**30
MATMUL_SIZE = 8192

Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Limits:
    """What this GPU reached in this run."""

    bytes_per_second: float
    flops_per_second: float

    def microseconds(self, case: Case) -> float:
        """The larger of the times to move the bytes and to do the arithmetic."""
        moving, computing = (
            case.bytes_moved / self.bytes_per_second,
            case.flops / self.flops_per_second,
        )
        return 1e6 * max(moving, computing)


class ColdTimer:
    """Times calls in turn, each after a write larger than the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.name = properties.name
        size = max(FLUSH_FACTOR * properties.L2_cache_size, LEAST_FLUSH_BYTES)
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def times(self, calls: Calls, repeats: int) -> dict[str, timing.Spread]:
        """Microseconds of each, after one turn that is not counted.

        Everything is queued before anything is waited for, so the GPU waits for no host.
        """
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
            name: [] for name in calls
        }
        for _ in range(repeats + 1):
            for name, call in calls.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._flush.zero_()
                start.record()
                call()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: timing.spread([1000 * start.elapsed_time(end) for start, end in pairs[1:]])
            for name, pairs in events.items()
        }


def find_timer() -> ColdTimer | None:
    """A timer on this machine's GPU, if torch can use one."""
    return ColdTimer(torch.device("cuda")) if torch.cuda.is_available() else None


def measure_limits(timer: ColdTimer) -> tuple[Limits, float]:
    """Bandwidth of a copy, both ways counted, and speed of a matrix product; and the microseconds that
    an almost empty graph takes, below which nothing here can be."""
    device = timer.device
    source, target = (torch.ones(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    square = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=DTYPE, device=device)
    product_ = torch.empty_like(square)
    tiny = torch.zeros(1, device=device)
    calls = {
        "copy": lambda: target.copy_(source),
        "matmul": lambda: torch.mm(square, square, out=product_),
        "empty": capture(lambda: tiny.add_(1))[0],
    }
    median = {name: spread.median for name, spread in timer.times(calls, 10).items()}
    limits = Limits(2e6 * COPY_BYTES / median["copy"], 2e6 * MATMUL_SIZE**3 / median["matmul"])
    return limits, median["empty"]


def capture(call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """A graph of the call: its replay, and the tensor that each replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph.replay, out


def cases(quick: bool, lengths: Sequence[int] | None) -> Iterator[Case]:
    """The largest step first within a length: what a short run must not miss."""
    shapes = (SHAPES[-1], AUTOREGRESSIVE) if quick else tuple(reversed(SHAPES))
    lengths = lengths or (QUICK_LENGTHS if quick else DEFAULT_LENGTHS)
    batches = (1,) if quick else (1, 8)
    for batch, length, heads, shape in product(batches, lengths, reversed(MODELS), shapes):
        yield Case(heads, shape, length, batch, DTYPE)


def measure(
    case: Case,
    repeats: int,
    operation: Attend,
    peers: Sequence[str],
    timer: ColdTimer,
    limits: Limits,
) -> dict[str, Any]:
    """Check everything that a replay fills in, then time. Raises WrongResult for our own kernel."""
    inputs = make_inputs(case, timer.device)
    expected = expect(inputs)
    attend, out = capture(inputs.call(operation, case.layout, implementation="triton"))
    attend()
    error = check("attend", case, out, expected)
    replays: dict[str, Callable[[], None]] = {"attend": attend}
    skipped = {}
    for name in peers:
        try:
            peer, first = attn_peers.prepare(name, case, inputs)
            check(name, case, first, expected, attn_peers.SLACK)
            replays[name] = _captured_peer(name, peer)
        except (attn_peers.Skipped, WrongResult) as reason:
            skipped[name] = str(reason)
    microseconds = timer.times(replays, repeats)
    limit = limits.microseconds(case)
    return {
        **case.to_dict(),
        "max_error": error,
        "limit_us": limit,
        "fraction_of_limit": limit / microseconds["attend"].median,
        "us": {name: spread.to_dict() for name, spread in microseconds.items()},
        "skipped": skipped,
    }


def _captured_peer(name: str, peer: attn_peers.Peer) -> Callable[[], None]:
    try:
        return capture(peer.call)[0]
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise attn_peers.Skipped(f"{name} cannot be captured: {reason[:200]}") from error


def time_all(
    the_cases: Sequence[Case],
    repeats: int,
    operation: Attend,
    peers: Sequence[str],
    seconds: float | None,
    timer: ColdTimer,
) -> dict[str, Any]:
    """Rows and what they are measured against; cases that would begin after `seconds` are left out."""
    limits, empty = measure_limits(timer)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for case in tqdm(the_cases, unit="case", leave=False, disable=None):
        if seconds is not None and time.monotonic() - began > seconds:
            break
        rows.append(measure(case, repeats, operation, peers, timer, limits))
        torch.cuda.empty_cache()
    return {
        "copy_gb_per_s": limits.bytes_per_second / 1e9,
        "matmul_tflops": limits.flops_per_second / 1e12,
        "empty_graph_us": empty,
        "cases_left_out": len(the_cases) - len(rows),
        "rows": rows,
    }


def reasons(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each reason why something was left out, once."""
    return list(dict.fromkeys(reason for row in rows for reason in row["skipped"].values()))


def table(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["us"] if name != "attend"))
    header = ["heads", "(W, N, G)", "batch", "length", "MB", "GFLOP", "limit us"]
    header += ["attend us", "p20-p80", "of limit", *(f"{name} us" for name in names), "max error"]
    return timing.table(header, [_cells(row, names) for row in rows])


def _cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    shape = "AR" if row["rows"] == 1 else str((row["window"], row["ngram"], row["guesses"]))
    ours = row["us"]["attend"]
    return [
        row["heads"],
        shape,
        str(row["batch"]),
        str(row["length"]),
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['flops'] / 1e9:.2f}",
        f"{row['limit_us']:.1f}",
        f"{ours['median']:.1f}",
        f"{ours['p20']:.1f}-{ours['p80']:.1f}",
        f"{100 * row['fraction_of_limit']:.0f}%",
        *(f"{row['us'][name]['median']:.1f}" if name in row["us"] else "-" for name in names),
        f"{row['max_error']:.1e}",
    ]
