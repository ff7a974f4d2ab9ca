"""Ctrl-C that comes within a callback from C is not lost."""

import ctypes
import os
import signal
import subprocess
import sys
import threading

import pytest
from tiny_checkpoint import write_tiny_checkpoint

from lookahead import interrupts
from lookahead.interrupts import interrupts_wait, lost_interrupts_come_again


@pytest.fixture(autouse=True)
def _handler():
    """A shell that started the tests in the background may have had them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def callback(raises):
    """A function that C calls, and that raises."""

    def call():
        raises()

    return ctypes.CFUNCTYPE(None)(call)


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def wait_for_it():
    """No longer than until it comes."""
    threading.Event().wait(60)


def fail():
    raise ValueError("not an interrupt")


def run(*calls):
    with lost_interrupts_come_again():
        for call in calls:
            call()


def test_an_interrupt_that_a_callback_loses_comes_again():
    with pytest.raises(KeyboardInterrupt):
        run(callback(press_ctrl_c), wait_for_it)


def test_it_comes_again_until_it_is_not_lost():
    """The first time that it comes again, another callback loses it."""
    with pytest.raises(KeyboardInterrupt):
        run(callback(press_ctrl_c), callback(wait_for_it), wait_for_it)


def test_it_comes_at_the_end_if_not_before(monkeypatch):
    monkeypatch.setattr(interrupts, "DELAY", 3600)
    seen = []
    with pytest.raises(KeyboardInterrupt):
        run(callback(press_ctrl_c), lambda: seen.append("the end"))
    assert seen == ["the end"]


def test_nothing_else_is_changed(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    report = sys.unraisablehook
    run(callback(fail))
    assert sys.unraisablehook is report
    assert [ignored.exc_type for ignored in reported] == [ValueError]
    with pytest.raises(ValueError, match="not an interrupt"):
        run(fail)
    assert sys.unraisablehook is report


def test_ctrl_c_while_a_kernel_is_compiled(tmp_path):
    """It comes whenever LLVM has compiled a function, in Numba's callback."""
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from numba.core.codegen import CPUCodeLibrary\n"
        "note = CPUCodeLibrary._object_compiled_hook\n"
        "def interrupted(*compiled):\n"
        "    note(*compiled)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "CPUCodeLibrary._object_compiled_hook = interrupted\n"
        "from lookahead.generate import _program; _program()"
    )
    ckpt = write_tiny_checkpoint(tmp_path / "checkpoint")
    options = ["--ckpt", str(ckpt), "--prompt", "abc", "--max-new-tokens", "1", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", program, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_waits_until_what_must_be_whole_is():
    done = []

    def interrupted() -> None:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
        done.append("more")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
