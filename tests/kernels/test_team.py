"""Threads that run one function together, and what becomes of them when one of them fails."""

import os
import subprocess
import sys
import threading
from itertools import pairwise

import numpy as np
import pytest
from numba import njit

from lookahead.kernels.team import Team, meet, share

ROUNDS = 200


@njit(nogil=True)
def relay(thread, num_threads, counter, arrivals, values):
    """In each round every thread adds to its neighbour's number of the round before."""
    for number in range(1, ROUNDS):
        neighbour = (thread + 1) % num_threads
        values[number, thread] = values[number - 1, neighbour] + 1
        arrivals = meet(counter, arrivals, num_threads)
    meet(counter, arrivals, num_threads)


def run_relay(team):
    values = np.zeros((ROUNDS, team.num_threads), dtype=np.int64)
    team.run(relay, values)
    return values[-1].tolist()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_wait_for_each_other(num_threads):
    team = Team(num_threads)
    for _ in range(3):
        assert run_relay(team) == [ROUNDS - 1] * num_threads


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("place", ["before its part", "between orders", "behind its part"])
def test_an_interrupted_run_is_carried_out_before_the_interrupt_goes_on(place, times, monkeypatch):
    team = Team(3)
    values = np.zeros((ROUNDS, 3), dtype=np.int64)
    interrupts = iter([KeyboardInterrupt] * times)

    def interrupt():
        for error in interrupts:
            raise error

    def interrupted(thread, *arguments):
        if thread == 0 and place == "before its part":
            interrupt()
        relay(thread, *arguments)
        if thread == 0 and place == "behind its part":
            interrupt()

    class Queue:
        def __init__(self, queue):
            self.queue = queue

        def put(self, order):
            self.queue.put(order)
            if place == "between orders":
                interrupt()

    monkeypatch.setattr(team, "_queues", [Queue(queue) for queue in team._queues])
    with pytest.raises(KeyboardInterrupt):
        team.run(interrupted, values)
    assert values[-1].tolist() == [ROUNDS - 1] * 3
    list(interrupts)
    assert run_relay(team) == [ROUNDS - 1] * 3


def test_two_callers_come_one_after_the_other():
    team, found = Team(2), []
    callers = [threading.Thread(target=lambda: found.append(run_relay(team))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert found == [[ROUNDS - 1] * 2] * 4


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_shares_are_all_there_is(count, num_threads):
    parts = [share(count, thread, num_threads) for thread in range(num_threads)]
    assert parts[0][0] == 0
    assert parts[-1][1] == count
    for before, after in pairwise(parts):
        assert before[1] == after[0]
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_child_has_threads_of_its_own():
    """Those of its parent are not there."""
    code = (
        "import os, torch\n"
        "from lookahead.kernels.product_numba import pack, product\n"
        "from lookahead.kernels.team import team_of\n"
        "x, packed = torch.ones(2, 64), pack(torch.ones(256, 64), None)\n"
        "y = torch.zeros(2, 256)\n"
        "product(team_of(2), x, packed, y)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    status = os.waitpid(child, 0)[1]\n"
        "    raise SystemExit(os.waitstatus_to_exitcode(status))\n"
        "y.zero_()\n"
        "product(team_of(2), x, packed, y)\n"
        "os._exit(0 if (y == 64).all() else 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120)
    assert done.returncode == 0
