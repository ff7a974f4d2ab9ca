"""The chat's command line: what it prints where, its commands, and what it refuses in one line."""

import io
import json
import subprocess
import sys

import pytest
from full_disk import FullDisk
from tiny_checkpoint import write_tiny_checkpoint

from lookahead import Engine, LookaheadConfig, whole_file
from lookahead.batch import Batch
from lookahead.chat import HELP, main

SHAPE = LookaheadConfig(4, 3, 2)
NUM_TOKENS = 8
NOTE = f"note: ended at {NUM_TOKENS} tokens, see --max-new-tokens"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine(checkpoint) -> Engine:
    return Engine.load(checkpoint, device="cpu", dtype="float32")


@pytest.fixture
def chat(checkpoint, capsys, monkeypatch):
    """Run a chat with these lines as piped input; returns exit code and both outputs' lines."""

    def run_main(lines, *options, ckpt=checkpoint):
        stdin = io.TextIOWrapper(io.BytesIO(b"".join(line + b"\n" for line in lines)))
        monkeypatch.setattr(sys, "stdin", stdin)
        shape = ("--window", 4, "--ngram", 3, "--guesses", 2)
        always = ("--ckpt", ckpt, "--device", "cpu", "--dtype", "float32", *shape)
        length = [] if "--max-new-tokens" in options else ["--max-new-tokens", NUM_TOKENS]
        code = main([str(option) for option in (*always, *length, *options)])
        output = capsys.readouterr()
        return code, output.out.split("\n"), output.err.splitlines()

    return run_main


def answers(engine, texts, system=None):
    """What the engine answers to these messages in turn."""
    conversation = engine.conversation(system)
    return [
        conversation.say(text, lookahead=SHAPE, max_new_tokens=NUM_TOKENS).run_to_end().text
        for text in texts
    ]


def test_answers_alone_are_on_standard_output(chat, engine):
    code, out, err = chat([b"abc", b"", b"   ", b" hg "])
    assert (code, out) == (0, [*answers(engine, ["abc", "hg"]), ""])
    assert err == [NOTE, NOTE]


def test_quit_leaves_what_follows(chat, engine):
    for command in (b"/quit", b"/exit"):
        code, out, _ = chat([b"abc", command, b"hg"])
        assert (code, out) == (0, [*answers(engine, ["abc"]), ""])
    assert chat([]) == (0, [""], [])


def test_help(chat):
    assert chat([b"/help"]) == (0, [""], HELP.splitlines())


def saved(path):
    return [(each["role"], each["content"]) for each in json.loads(path.read_text("utf-8"))]


def test_ctrl_c_before_the_answer_leaves_the_message_out(chat, tmp_path, monkeypatch):
    path, start = tmp_path / "messages", Batch._start
    numbers = iter(range(3))

    def interrupted(self, sequence, answer):
        if next(numbers) == 1:
            raise KeyboardInterrupt
        start(self, sequence, answer)

    monkeypatch.setattr(Batch, "_start", interrupted)
    lines = ["abc", "bad", "/stats", "hg", f"/save {path}"]
    code, _, err = chat([line.encode() for line in lines])
    assert code == 0
    assert err[:2] == [NOTE, "note: interrupted before the answer began: the message is left out"]
    assert "session: 1 answer, " in err[4]
    assert [text for role, text in saved(path) if role == "user"] == ["abc", "hg"]


def test_save_keeps_what_was_there_if_it_fails(chat, tmp_path, monkeypatch):
    path = tmp_path / "messages"
    path.write_text("precious")
    monkeypatch.setattr(whole_file, "FileIO", FullDisk)
    code, _, err = chat([b"abc", f"/save {path}".encode()])
    assert (code, err[-1]) == (2, f"error: {path} cannot be written: No space left on device")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["precious"]


def test_save_does_not_write_over_the_chats_own_output(checkpoint, tmp_path):
    path, loop = tmp_path / "output", tmp_path / "loop"
    path.write_text("previous\n")
    loop.symlink_to(loop)
    lines = f"abc\n/save {path}\n/save {loop}\nabc\n"
    command = [
        sys.executable,
        "-m",
        "lookahead.chat",
        "--ckpt",
        checkpoint,
        "--max-new-tokens",
        "3",
    ]
    with path.open("a") as output:
        done = subprocess.run(
            command, input=lines, stdout=output, stderr=subprocess.PIPE, text=True, check=False
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2
    assert errors[0] == f"error: {path} is where this chat writes to: name another file"
    assert errors[1].startswith(f"error: {loop} cannot be written: Too many levels")
    assert path.read_text().startswith("previous\n")
    assert len(path.read_text().split("\n")) == 4, "both answers are there"


def test_save_system_and_reset(chat, engine, tmp_path):
    first, second, third, fourth = (tmp_path / name for name in "abcd")
    lines = [
        *("é", f"/save {first}", "/system be bad", "hg", f"/save {second}"),
        *("/reset", f"/save  {third} ", "/system", "x", f"/save {fourth}"),
    ]
    code, out, err = chat([line.encode() for line in lines], "--system", "be brief")
    note = (
        "note: the chat template, or a new system message, changed what was said before: all of it is "
        "encoded anew"
    )
    assert (code, err) == (0, [NOTE, note, NOTE, NOTE])
    said = answers(engine, ["é"], "be brief")
    talk = [("user", "é"), ("assistant", said[0])]
    assert saved(first) == [("system", "be brief"), *talk]
    talk += [("user", "hg"), ("assistant", out[1])]
    assert saved(second) == [("system", "be bad"), *talk]
    assert saved(third) == [("system", "be bad")]
    assert saved(fourth) == [("user", "x"), ("assistant", answers(engine, ["x"])[0])]
    assert out == [said[0], talk[-1][1], saved(fourth)[-1][1], ""]


def test_stats(chat, engine):
    _, _, err = chat([b"/stats", b"abc", b"hg", b"/stats"])
    assert err[0] == "stats: there is no answer yet"
    assert err[1:4] == [NOTE, NOTE, "stats: (window, ngram, guesses): (4, 3, 2), given"]
    first, both = len("u:abc\na"), len("u:abc\na:") + NUM_TOKENS + len("\nu:hg\na")
    reused = first + NUM_TOKENS
    last = rf"stats: last answer: {NUM_TOKENS} tokens, "
    assert err[4].startswith(last)
    assert err[4].endswith(f"; prompt: {both - reused} tokens prefilled, {reused} reused")
    assert err[5].startswith(f"stats: session: 2 answers, {2 * NUM_TOKENS} tokens, ")
    assert err[5].endswith(f"; prompt: {first + both - reused} tokens prefilled, {reused} reused")
    _, _, err = chat([b"abc", b"/stats"], "--mode", "autoregressive")
    assert err[1] == "stats: (window, ngram, guesses): (0, 2, 0), autoregressive"
    assert f"{NUM_TOKENS} tokens, {NUM_TOKENS} steps, 1.00 tokens/step, " in err[2]


def test_the_end_of_the_context(chat, engine):
    context = len("u:abc\na:") + NUM_TOKENS
    code, out, err = chat([b"abc", b"hg", b"/reset", b"abc"], "--max-length", context)
    assert (code, out) == (2, [*answers(engine, ["abc"]) * 2, ""])
    assert err == [
        NOTE,
        f"error: with this message the conversation has {context + 8} tokens, at most {context - 1} "
        f"fit in a context of {context}: shorten the message, or begin anew with reset(), /reset in "
        "the chat",
        NOTE,
    ]
    _, _, err = chat([b"abc"], "--max-length", context - 1)
    full = "note: the context is full: /reset begins anew, --max-length may give more room"
    assert err == [full]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            b"/foo bar",
            "there is no command /foo: /help lists them; put a space before a message that begins "
            "with /",
        ),
        (
            b"/",
            "there is no command /: /help lists them; put a space before a message that begins with /",
        ),
        (b"/save", "/save needs the name of a file"),
        (b"/save /", "/ cannot be written: Is a directory"),
        (b"/save /no/such/file", "/no/such/file cannot be written: No such file or directory"),
        (b"/save a\0b", "a?b cannot be written: embedded null byte"),
        (
            b"caf\xe9",
            "the text has half a character ('\\udce9') at position 3; expected Unicode text; was it "
            "read from something that is not UTF-8?",
        ),
        (
            b"/system caf\xe9",
            "the text has half a character ('\\udce9') at position 3; expected Unicode text; was it "
            "read from something that is not UTF-8?",
        ),
    ],
)
def test_lines_that_are_refused(chat, engine, line, said):
    code, out, err = chat([line, b"abc"])
    assert (code, out) == (2, [*answers(engine, ["abc"]), ""])
    assert err == [f"error: {said}", NOTE]


def test_a_message_that_begins_like_a_command(chat, engine):
    assert chat([b" /reset"])[1] == [*answers(engine, ["/reset"]), ""]


def test_options_that_are_refused(chat, tmp_path):
    plain = write_tiny_checkpoint(tmp_path / "plain", chat_template=None)
    cases = [
        (["--window", "-1"], "window must be a whole number of at least 0, got -1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be a whole number of at least 1, got 0"),
        (["--mode", "fast"], "argument --mode: invalid choice: 'fast'"),
        (["--prompt", "abc"], "unrecognized arguments: --prompt abc; see --help"),
        (["--max-length", "9999"], "max_length 9999 is more than the 512 positions of the model"),
        (["--dtype", "int3"], "dtype"),
        (["--window", "99"], "(window, ngram, guesses) = (99, 3, 2) takes 202 rows a step"),
        (["--ckpt", tmp_path / "none"], f"no such checkpoint directory: {tmp_path / 'none'}"),
        (["--ckpt", plain], f"a chat needs a chat template and {plain} has none"),
        (["--system", "\udce9"], "the text has half a character"),
    ]
    for options, said in cases:
        code, out, err = chat([], *options)
        assert (code, out, len(err)) == (2, [""], 1), options
        assert err[0].startswith(f"error: {said}"), options


def test_a_template_that_refuses_messages(chat, tmp_path):
    template = "{{ raise_exception('roles must take turns') }}"
    ckpt = write_tiny_checkpoint(tmp_path, chat_template=template)
    code, out, err = chat([b"abc"], ckpt=ckpt)
    assert (code, out, len(err)) == (2, [""], 1)
    assert "refused the messages: roles must take turns; " in err[0]


def test_standard_input_that_is_closed(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["--ckpt", str(checkpoint)]) == 2
    assert capsys.readouterr().err.startswith("error: standard input is closed: ")


def test_as_a_program(checkpoint, engine):
    command = [
        sys.executable,
        "-m",
        "lookahead.chat",
        "--ckpt",
        str(checkpoint),
        "--dtype",
        "float32",
    ]
    shape = ["--window", "4", "--ngram", "3", "--guesses", "2"]
    length = ["--device", "cpu", "--max-new-tokens", str(NUM_TOKENS)]
    done = subprocess.run(
        [*command, *shape, *length], input=b"abc\nhg\n/foo\n", capture_output=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout.decode().splitlines() == answers(engine, ["abc", "hg"])
    assert done.stderr.count(b"\n") == 3
