"""Threads that run one compiled function together.

A step has hundreds of phases of a few microseconds each; between them threads meet at a barrier inside
the compiled function, without returning to Python. Knows nothing of what they compute.
"""

import threading
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_PATIENCE = 2000  # looks at the counter before the processor is offered to others
_IS_X86 = binding.get_process_triple().startswith(("x86_64", "i686"))


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
        if _IS_X86:
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


@njit(nogil=True)
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


@njit(nogil=True)
def share(count, thread, num_threads):
    """The part of 0..count-1 that is this thread's: its first and the one behind its last."""
    return count * thread // num_threads, count * (thread + 1) // num_threads


class Team:
    """The calling thread and `num_threads` - 1 others. One function runs at a time."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._counter = np.zeros(1, dtype=np.int64)
        self._address = self._counter.ctypes.data
        self._orders: list[SimpleQueue] = []
        self._lock = threading.Lock()
        for thread in range(1, num_threads):
            orders: SimpleQueue = SimpleQueue()
            threading.Thread(target=_follow, args=(thread, orders), daemon=True).start()
            self._orders.append(orders)

    def run(self, function: Callable, *arguments: Any) -> None:
        """Call function(thread, num_threads, counter, arrivals, *arguments) in every thread; it must
        end with `meet`, so that all are done when this returns."""
        with self._lock:
            where = (self.num_threads, self._address, int(self._counter[0]))
            for orders in self._orders:
                orders.put((function, (*where, *arguments)))
            function(0, *where, *arguments)


@cache
def team_of(num_threads: int) -> Team:
    """The one team of that size; its threads wait for as long as the process lives."""
    return Team(num_threads)


def _follow(thread: int, orders: SimpleQueue) -> None:
    while True:
        function, arguments = orders.get()
        function(thread, *arguments)
        del function, arguments  # they may hold memory that is not needed any more
