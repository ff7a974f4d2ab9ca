"""Threads that run one compiled function together.

A step has hundreds of phases of a few microseconds each; between them threads meet at a barrier inside
the compiled function, without returning to Python. Knows nothing of what they compute.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lookahead.kernels.simd import ask
from lookahead.kernels.simd_types import IS_X86, LINE, kernel

# Whole numbers that `Team.run` gives a function before its own arguments.
NUM_TEAM_ARGUMENTS = 4
_PATIENCE = 2000  # looks at the counter before the processor is offered to others


@intrinsic
def _arrive(_context, address):
    """Add one to the counter at an address, for all threads to see."""

    def emit(_, builder, signature, arguments):
        integer = ir.IntType(64)
        place = builder.inttoptr(arguments[0], ir.PointerType(integer))
        return builder.atomic_rmw("add", place, ir.Constant(integer, 1), "seq_cst")

    return types.int64(types.int64), emit


@intrinsic
def _look(_context, address):
    """Read the counter."""

    def emit(_, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], ir.PointerType(ir.IntType(64)))
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def _pause(_context):
    """Tell the processor that this is a waiting loop."""

    def emit(context, builder, signature, arguments):
        if IS_X86:
            nothing = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, name), [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _yield_processor(_context):
    """Let another thread run."""

    def emit(_, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])

    return types.int32(), emit


@kernel
def meet(counter, arrivals, num_threads):
    """Wait until all threads are here.

    Args:
        counter: address that `Team.run` gave.
        arrivals: what the last `meet` returned, at first what `Team.run` gave.

    Returns:
        `arrivals` for the next time.
    """
    arrivals += num_threads
    _arrive(counter)
    looks = 0
    while _look(counter) < arrivals:
        looks += 1
        if looks < _PATIENCE:
            _pause()
        else:
            _yield_processor()
    return arrivals


@kernel
def meet_and_ask(counter, arrivals, num_threads, ahead, end):
    """`meet`; lines of memory from address `ahead` to `end` are asked for while waiting.

    Returns:
        `arrivals` for the next time, and the next `ahead`.
    """
    arrivals += num_threads
    _arrive(counter)
    looks = 0
    while _look(counter) < arrivals:
        if ahead < end:
            ask(ahead)
            ahead += LINE
        looks += 1
        if looks < _PATIENCE:
            _pause()
        else:
            _yield_processor()
    return arrivals, ahead


@kernel
def share(count, thread, num_threads):
    """The part of 0..count-1 that is this thread's: its first and the one behind its last."""
    return count * thread // num_threads, count * (thread + 1) // num_threads


class Team:
    """The calling thread and `num_threads` - 1 others. One function runs at a time."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._counter = np.zeros(1, dtype=np.int64)
        self._address = self._counter.ctypes.data
        self._queues: list[SimpleQueue] = []
        self._orders_given = 0
        self._lock = threading.Lock()
        for thread in range(1, num_threads):
            queue: SimpleQueue = SimpleQueue()
            threading.Thread(target=_follow, args=(thread, queue), daemon=True).start()
            self._queues.append(queue)

    def run(self, function: Callable, *arguments: Any) -> None:
        """Call function(thread, num_threads, counter, arrivals, *arguments) in every thread; it must
        `meet` at its end, so that all are done when this returns."""
        with self._lock:
            start = int(self._counter[0])
            self._orders_given += 1
            where = (self.num_threads, self._address, start)
            order = _Order(self._orders_given, function, (*where, *arguments))
            try:
                self._carry_out(order)
            except BaseException:
                # Ctrl-C, perhaps before this thread came to do its part, for which the others wait.
                while self._queues and self._counter[0] < start + self.num_threads:
                    with suppress(KeyboardInterrupt):
                        self._carry_out(order)
                raise

    def _carry_out(self, order: "_Order") -> None:
        for queue in self._queues:
            queue.put(order)
        order.function(0, *order.arguments)


class _Order(NamedTuple):
    number: int
    function: Callable
    arguments: tuple


@cache
def team_of(num_threads: int) -> Team:
    """The one team of that size; its threads wait for as long as the process lives."""
    return Team(num_threads)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=team_of.cache_clear)  # a child has none of its threads


def _follow(thread: int, queue: SimpleQueue) -> None:
    """Carry out each order once, however often it is given."""
    last = 0
    while True:
        order = queue.get()
        if order.number > last:
            last = order.number
            with suppress(Exception):  # whatever it is, the calling thread meets it too
                order.function(thread, *order.arguments)
        del order  # it may hold memory that is not needed any more
