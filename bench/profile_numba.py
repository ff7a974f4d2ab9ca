"""Where the compiled forward pass on a CPU spends its time: the clock at each of its meetings.

The function that runs is `forward_numba.run_forward`'s own code, and its meetings `team.py`'s, compiled
once more so that the last thread to arrive notes the time; the engine's compiled function stays as it
is. Weights that a thread asks for while it attends or waits are read in that phase, not in the product
that uses them. Knows which phase lies between two meetings, and nothing of steps.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lookahead.kernels import team
from lookahead.kernels.simd_types import kernel
from lookahead.models import forward_numba, llama_numba

# What is done before each meeting: first the rows are found, which is not counted, then these.
FIRST_PHASES = ("rest",)  # embedding, and the first norm
LAYER_PHASES = (
    "products",  # queries, keys, values
    "rest",  # rotation, and writing keys and values
    "attention",
    "products",  # output
    "norm",
    "products",  # gate, up
    "rest",  # silu
    "products",  # down
    "norm",
)
LAST_PHASES = (
    "rest",  # gathering the rows with logits
    "head + argmax",
)
# A team's counter, and behind it: where it stood, how many threads it counts, how many times there is
# room for, the times.
BASE, THREADS, ROOM, TIMES = range(1, 5)
MOST_PHASES = 8192


@intrinsic
def _now(_context):
    """Nanoseconds, of the clock that `time.monotonic` reads."""

    def emit(_, builder, signature, arguments):
        integer, number = ir.IntType(64), ir.IntType(32)
        place = cgutils.alloca_once(builder, ir.ArrayType(integer, 2))
        kind = ir.FunctionType(number, [number, place.type])
        read = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(read, [ir.Constant(number, time.CLOCK_MONOTONIC), place])
        seconds, rest = (builder.extract_value(builder.load(place), part) for part in (0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(integer, 10**9)), rest)

    return types.int64(), emit


@intrinsic
def _read(_context, address, place):
    """The number at a place behind an address."""

    def emit(_, builder, signature, arguments):
        return builder.load(_pointer(builder, *arguments))

    return types.int64(types.int64, types.int64), emit


@intrinsic
def _write(_context, address, place, value):
    """Write the number at a place behind an address."""

    def emit(context, builder, signature, arguments):
        builder.store(arguments[2], _pointer(builder, *arguments[:2]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _pointer(builder: Any, address: Any, place: Any) -> Any:
    base = builder.inttoptr(address, ir.PointerType(ir.IntType(64)))
    return builder.gep(base, [place])


@kernel
def _arrive_and_note(counter):
    """As `team._arrive`; the last to come to a meeting notes when."""
    now = _now()
    before = team._arrive(counter)
    arrived, threads = before + 1 - _read(counter, BASE), _read(counter, THREADS)
    meeting = arrived // threads - 1
    if arrived % threads == 0 and meeting < _read(counter, ROOM):
        _write(counter, TIMES + meeting, now)
    return before


def _with_names(function: Any, **names: Any) -> Any:
    """A compiled function's code, compiled anew with other functions behind these names."""
    code = function.py_func
    return kernel(FunctionType(code.__code__, {**code.__globals__, **names}, code.__name__))


@kernel
def _only_meet(thread, num_threads, counter, arrivals):
    team.meet(counter, arrivals, num_threads)


@cache
def noting_forward() -> Any:
    """`run_forward`, compiled when it is first called, which takes as long as it does."""
    meetings = {
        name: _with_names(getattr(team, name), _arrive=_arrive_and_note)
        for name in ("meet", "meet_and_ask")
    }
    return _with_names(forward_numba.run_forward, **meetings)


class NotingTeam(team.Team):
    """Threads that note the times of `noting_forward`'s meetings.

    Attributes:
        nanoseconds: by phase, of all calls so far.
    """

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self._counter = np.zeros(TIMES + MOST_PHASES, dtype=np.int64)
        self._address = self._counter.ctypes.data
        self._counter[THREADS], self._counter[ROOM] = num_threads, MOST_PHASES
        self.nanoseconds: Counter[str] = Counter()

    def run(self, function: Any, *arguments: Any) -> None:
        """See `Team.run`."""
        self._counter[BASE] = self._counter[0]
        self._counter[TIMES:] = 0
        super().run(function, *arguments)
        super().run(_only_meet)  # behind it all threads have noted
        times = self._counter[TIMES:]
        times = times[: np.count_nonzero(times)]
        if len(times):
            for phase, spent in zip(phases(len(times)), np.diff(times).tolist(), strict=True):
                self.nanoseconds[phase] += spent


def phases(meetings: int) -> tuple[str, ...]:
    """What lies between so many meetings of a forward pass."""
    layers, left = divmod(meetings - 1 - len(FIRST_PHASES + LAST_PHASES), len(LAYER_PHASES))
    assert left == 0, f"{meetings} meetings are not those of run_forward"
    return FIRST_PHASES + LAYER_PHASES * layers + LAST_PHASES


@cache
def _noting_team(num_threads: int) -> NotingTeam:
    return NotingTeam(num_threads)


@contextmanager
def forward_phases(num_threads: int) -> Iterator[Counter[str]]:
    """Within it, models of implementation "numba" run with times noted; yields seconds by phase, filled
    at its end."""
    noting = _noting_team(num_threads)
    noting.nanoseconds.clear()
    seconds: Counter[str] = Counter()
    with (
        patch.object(llama_numba, "run_forward", noting_forward()),
        patch.object(llama_numba, "team_of", lambda _: noting),
    ):
        yield seconds
    for phase, spent in noting.nanoseconds.items():
        seconds[phase] = spent / 1e9
