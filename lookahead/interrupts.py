"""Ctrl-C that comes while a callback runs that cannot pass it on, or when it is to wait.

LLVM tells Numba of what it compiled through a callback from C. Ctrl-C while LLVM is at work, which it
is for much of a first load, is raised in there, and Python can only report it as ignored.
"""

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

DELAY = 0.05  # seconds until an interrupt that was lost comes again; the callback is over by then


@contextmanager
def lost_interrupts_come_again() -> Iterator[None]:
    """Within, a KeyboardInterrupt that was ignored is not reported but raised again soon after, at the
    latest at the end."""
    report = sys.unraisablehook
    lost: list[None] = []  # at most one; who takes it out raises it

    def keep(ignored: "sys.UnraisableHookArgs") -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            report(ignored)
        elif not lost:
            # Not from here: this is still within the callback. Nor does this wait for the thread, as
            # `threading` does: another interrupt would end the waiting.
            lost.append(None)
            _thread.start_new_thread(bring_back, ())

    def bring_back() -> None:
        time.sleep(DELAY)
        if _take(lost):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = report
        was_lost = _take(lost)
    if was_lost:
        raise KeyboardInterrupt


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Within, Ctrl-C waits until the end."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not is_main or before is not signal.default_int_handler:  # then nothing is interrupted
        yield
        return
    came: list[None] = []
    signal.signal(signal.SIGINT, lambda *_: came.append(None))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _take(found: list[None]) -> bool:
    """Take one out, if there is one, as no other thread can at the same time."""
    try:
        found.pop()
    except IndexError:
        return False
    return True
