"""The chat on a terminal of its own, as people use it: many turns, Ctrl-C, and the ways to leave."""

import json
import os
import re
import select
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_checkpoint import CHAT_TEMPLATE, write_tiny_checkpoint

from lookahead.chat import PROMPT

pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX only")
termios = pytest.importorskip("termios", reason="pseudo-terminals are POSIX only")

LONG = 200_000  # more tokens than can come before a test has seen the first few and has acted
PATIENCE = 300  # seconds, for a machine that does much else
# Ctrl-C is for the terminal's own process; who started the tests may have had them ignore it.
PROGRAM = (
    "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from lookahead.chat import main; sys.exit(main())"
)
CTRL_C, CTRL_D = "\x03", "\x04"
COLOURED = re.compile(r"\033\[(\d+)m(.*?)\033\[0m", re.DOTALL)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    return write_tiny_checkpoint(directory, max_position_embeddings=LONG)


class Terminal:
    """A chat in a terminal: what is typed, and what is shown since then."""

    def __init__(self, *options: object) -> None:
        self._terminal, its_other_end = pty.openpty()
        keep_output_at_ctrl_c(its_other_end)
        command = [sys.executable, "-c", PROGRAM, *map(str, options)]
        surroundings = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=its_other_end,
            stdout=its_other_end,
            stderr=its_other_end,
            env=surroundings,
            start_new_session=True,
        )
        os.close(its_other_end)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def read_until(self, end: str | None) -> str:
        """What is shown up to this text; None for all up to the end of the program."""
        shown, give_up_at = "", time.monotonic() + PATIENCE
        while end is None or end not in shown:
            left = give_up_at - time.monotonic()
            ready, _, _ = select.select([self._terminal], [], [], max(left, 0))
            assert ready, f"{end!r} did not come within {PATIENCE} seconds, but {shown[-2000:]!r}"
            try:
                piece = os.read(self._terminal, 4096)
            except OSError:  # how Linux says that the other end is closed
                piece = b""
            if not piece:
                assert end is None, f"it ended before {end!r}: {shown[-2000:]!r}"
                break
            shown += piece.decode()
        return shown

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def say(self, line: str) -> str:
        """Type a line; what is shown until the next prompt, without it."""
        self.type(f"{line}\r")
        return self.read_until(PROMPT).removesuffix(PROMPT)

    def leave(self, how: str) -> int:
        """Exit code."""
        # Ctrl-C between a prompt and the moment at which Python waits for keys is noticed with the next
        # key only: so it is typed again.
        give_up_at = time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < give_up_at:
            with suppress(OSError):  # it has ended by now
                self.type(how)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self.read_until(None)
        return self._process.wait(PATIENCE)


def keep_output_at_ctrl_c(terminal: int) -> None:
    """A terminal drops what it was given and nobody has read yet when Ctrl-C is typed; not this one."""
    attributes = termios.tcgetattr(terminal)
    attributes[3] |= termios.NOFLSH  # of the local modes
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)


@pytest.fixture
def start(checkpoint):
    """Start a chat, up to its first prompt."""

    def start_chat(max_new_tokens):
        terminal = Terminal(
            *("--ckpt", checkpoint, "--device", "cpu", "--dtype", "float32"),
            *("--max-length", LONG, "--max-new-tokens", max_new_tokens),
            *("--window", 4, "--ngram", 3, "--guesses", 2, "--system", "be brief"),
        )
        assert "/help lists commands" in terminal.read_until(PROMPT)
        return terminal

    return start_chat


def answer_in(shown: str) -> str:
    return "".join(text for _, text in COLOURED.findall(shown))


def counts_in(shown: str) -> tuple[int, int]:
    """Tokens of the last answer's prompt: prefilled, reused."""
    found = re.search(r"last answer: .*; prompt: (\d+) tokens prefilled, (\d+) reused", shown)
    assert found, shown
    return int(found[1]), int(found[2])


def rendered(messages: list[dict[str, str]]) -> str:
    """`CHAT_TEMPLATE`; a character is a token."""
    assert CHAT_TEMPLATE.startswith(
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n"
    )
    return "".join(f"{each['role'][0]}:{each['content']}\n" for each in messages) + "a:"


def test_twenty_turns(start, tmp_path):
    messages = [{"role": "system", "content": "be brief"}]
    reused = total = 0
    with start(6) as terminal:
        for number in range(20):
            text = f"message {number} abc"
            shown = terminal.say(text)
            messages.append({"role": "user", "content": text})
            answer = answer_in(shown)
            assert len(answer) == 6
            prompt = len(rendered(messages))
            stats = terminal.say("/stats")
            assert counts_in(stats) == (prompt - 1 - reused, reused)
            total += prompt - 1 - reused
            answers = "1 answer" if number == 0 else f"{number + 1} answers"
            assert f"session: {answers}, {6 * (number + 1)} tokens, " in stats
            assert f"; prompt: {total} tokens prefilled, " in stats.splitlines()[-1]
            messages.append({"role": "assistant", "content": answer})
            reused = prompt + len(answer) - 1
        path = tmp_path / "messages.json"
        assert "error" not in terminal.say(f"/save {path}")
        assert json.loads(path.read_text("utf-8")) == messages
        assert terminal.leave(CTRL_D) == 0


def test_ctrl_c_ends_the_answer_and_not_the_session(start, tmp_path):
    messages = [{"role": "system", "content": "be brief"}]
    path = tmp_path / "messages.json"
    reused = 0
    with start(LONG) as terminal:
        for text in ("abc abd", "hg", "x"):
            terminal.type(f"{text}\r")
            shown = terminal.read_until("\033[0m")  # the first step's tokens
            terminal.type(CTRL_C)
            shown += terminal.read_until(PROMPT).removesuffix(PROMPT)
            answer = answer_in(shown)
            messages.append({"role": "user", "content": text})
            prompt = len(rendered(messages))
            messages.append({"role": "assistant", "content": answer})
            assert 1 <= len(answer) < LONG / 2
            assert "Traceback" not in shown
            terminal.say(f"/save {path}")
            assert json.loads(path.read_text("utf-8")) == messages
            assert counts_in(terminal.say("/stats")) == (prompt - 1 - reused, reused)
            reused = prompt + len(answer) - 1
        assert terminal.leave("/quit\r") == 0


def test_the_tokens_of_a_step_share_a_colour(start):
    with start(40) as terminal:
        colours = [colour for colour, _ in COLOURED.findall(terminal.say("abc abd abc"))]
    assert all(one != other for one, other in pairwise(colours))
    assert 2 <= len(colours) <= 40


@pytest.mark.parametrize(("how", "code"), [(CTRL_C, 130), (CTRL_D, 0), ("/exit\r", 0)])
def test_ways_to_leave(start, how, code):
    with start(4) as terminal:
        assert "there is no command /foo" in terminal.say("/foo")  # and it goes on
        assert terminal.leave(how) == code
