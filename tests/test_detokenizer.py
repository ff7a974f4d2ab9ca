"""Text of ids, whole and in pieces."""

import random
from collections.abc import Callable

import pytest
import sentencepiece
from tokenizers import Tokenizer as LibraryTokenizer
from vocabularies import (
    HARD_TEXT,
    LINES,
    copy_llama2_style,
    find_smollm2,
    write_byte_fallback,
    write_byte_level,
    write_sentencepiece,
)

from lookahead.detokenizer import ByteRule, Decoding, IncrementalDetokenizer
from lookahead.tokenizer import Tokenizer

MARK = "\N{REPLACEMENT CHARACTER}"
PIECES_OF_TEXT = [
    *HARD_TEXT.split(" "),
    *LINES[:5],
    "👩‍👩‍👧‍👦",
    "🇩🇪🇯🇵",
    "漢字かな",
    "e\u0301\u0327",
    "\ufffd",
    "  ",
    "\n\n",
    "▁",
]


@pytest.fixture(
    params=["byte level", "byte fallback", "sentencepiece", "llama 2", "smollm2"], scope="module"
)
def case(request, tmp_path_factory) -> tuple[Tokenizer, Callable[[list[int]], str]]:
    """A tokenizer, and the decoding of whole id sequences by the library that made its file."""
    if request.param == "smollm2":
        directory = find_smollm2()
    else:
        write = {
            "byte level": write_byte_level,
            "byte fallback": write_byte_fallback,
            "sentencepiece": write_sentencepiece,
            "llama 2": copy_llama2_style,
        }[request.param]
        directory = write(tmp_path_factory.mktemp("checkpoint"))
    if (directory / "tokenizer.json").is_file():
        library = LibraryTokenizer.from_file(str(directory / "tokenizer.json"))
        return Tokenizer.load(directory), library.decode
    model = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))

    def decode(ids: list[int]) -> str:
        shown = [token_id for token_id in ids if token_id > 2]  # without <unk>, <s> and </s>
        text = model.decode(shown)
        # It drops the space that a leading piece begins with, but not one that is a byte token;
        # the tokenizers library drops either, and so do we.
        return text[1:] if shown and shown[0] == 0x20 + 3 else text

    return Tokenizer.load(directory), decode


def random_ids(tokenizer: Tokenizer, generator: random.Random) -> list[int]:
    """Any ids, ids of real text, and broken text: ids left out of it, doubled, or swapped."""
    ids: list[int] = []
    for _ in range(generator.randint(0, 6)):
        kind = generator.randrange(4)
        if kind == 0:
            ids += generator.choices(range(tokenizer.vocab_size), k=generator.randint(1, 8))
        else:
            ids += tokenizer.encode(generator.choice(PIECES_OF_TEXT), generator.random() < 0.2)
        if kind == 1 and ids:
            del ids[generator.randrange(len(ids))]
        if kind == 2:
            ids.insert(
                generator.randint(0, len(ids)), generator.randrange(min(260, len(ids) + 250))
            )
    return ids


def push_in_pieces(
    detokenizer: IncrementalDetokenizer, ids: list[int], generator: random.Random
) -> list[str]:
    pieces = []
    start = 0
    while start < len(ids):
        size = generator.choice((1, 1, 1, 2, 3, 7))
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
        assert len(detokenizer.text_ends) <= min(start, len(ids))
    return pieces


def test_pieces_of_any_ids_join_to_the_text_of_all(case):
    tokenizer, decode = case
    generator = random.Random(20)
    seen_mark = False
    for _ in range(3000):
        ids = random_ids(tokenizer, generator)
        text = decode(ids)
        assert tokenizer.decode(ids) == text, ids
        detokenizer = tokenizer.detokenizer()
        pieces = push_in_pieces(detokenizer, ids, generator)
        # Nothing shown is ever taken back, so no piece ended in half a character.
        assert text.startswith("".join(pieces)), ids
        assert "".join([*pieces, detokenizer.flush()]) == text, ids
        ends = detokenizer.text_ends
        assert len(ends) == len(ids)
        assert ends == sorted(ends)
        assert not ends or ends[-1] == len(text)
        seen_mark = seen_mark or MARK in text
    assert seen_mark


def test_each_id_ends_where_its_last_character_does(case):
    tokenizer, _ = case
    fragment = tokenizer._vocabulary.decoding.fragment
    generator = random.Random(21)
    for _ in range(300):
        text = " ".join(generator.choices(PIECES_OF_TEXT, k=4))
        ids = tokenizer.encode(text)
        detokenizer = tokenizer.detokenizer()
        push_in_pieces(detokenizer, ids, generator)
        detokenizer.flush()
        shown = [fragment(token_id) or b"" for token_id in ids]
        data = [part.encode() if isinstance(part, str) else part for part in shown]
        dropped = len(b"".join(data).decode()) - len(tokenizer.decode(ids))  # a leading space
        for count, end in enumerate(detokenizer.text_ends, start=1):
            # Half a character at the end decodes to one mark: as long as the whole character.
            so_far = b"".join(data[:count]).decode(errors="replace")
            assert end == max(len(so_far) - dropped, 0)
        assert detokenizer.text_ends[-1] == len(tokenizer.decode(ids))


def test_text_is_shown_as_soon_as_no_later_id_can_change_it(case):
    tokenizer, _ = case
    text = "naïve café über 漢字 мир 👩‍👩‍👧‍👦 🇩🇪 e\u0301 end"
    detokenizer = tokenizer.detokenizer()
    shown = ""
    pushed: list[int] = []
    for token_id in tokenizer.encode(text):
        shown += detokenizer.push([token_id])
        pushed.append(token_id)
        missing = len(tokenizer.decode(pushed).rstrip(MARK)) - len(shown)
        in_a_run = tokenizer._vocabulary.decoding.byte_rule is ByteRule.RUN
        assert missing == 0 or (in_a_run and len(detokenizer.text_ends) < len(pushed))
    assert shown == text
    assert detokenizer.flush() == ""


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]


def test_byte_tokens_in_a_tokenizer_model(tmp_path):
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path))
    the = tokenizer.token_to_id("▁the")
    detokenizer = tokenizer.detokenizer()
    smile = byte_tokens(tokenizer, "🙂".encode())
    assert [detokenizer.push([token_id]) for token_id in smile] == ["", "", "", "🙂"]
    assert detokenizer.text_ends == [1, 1, 1, 1]
    assert detokenizer.push([*smile[:2], 2]) == ""  # the hidden </s> waits with them
    assert detokenizer.text_ends == [1, 1, 1, 1]
    assert detokenizer.push([*smile[2:], the]) == "🙂 the"
    assert detokenizer.text_ends == [1, 1, 1, 1, 2, 2, 2, 2, 2, 6]
    assert detokenizer.push(smile[:3]) == ""
    assert detokenizer.push([smile[0]]) == MARK * 3  # those three will never be a character
    assert detokenizer.text_ends[10:] == [7, 8, 9]
    assert detokenizer.flush() == MARK
    assert detokenizer.text_ends[10:] == [7, 8, 9, 10]


def test_byte_tokens_in_a_tokenizer_json_wait_for_the_end_of_their_run(tmp_path):
    tokenizer = Tokenizer.load(write_byte_fallback(tmp_path))
    the = tokenizer.token_to_id("▁the")
    detokenizer = tokenizer.detokenizer()
    two = byte_tokens(tokenizer, "é🙂".encode())
    assert detokenizer.push([the, *two[:2]]) == "the"
    assert detokenizer.push(two[2:]) == ""
    assert detokenizer.text_ends == [3]
    assert detokenizer.push([2, the]) == "é🙂 the"
    assert detokenizer.text_ends == [3, 4, 4, 5, 5, 5, 5, 5, 9]
    assert detokenizer.push([*two, two[0]]) == ""
    assert detokenizer.push([the]) == MARK * 7 + " the"
    assert detokenizer.text_ends[9:] == [10, 11, 12, 13, 14, 15, 16, 20]
    assert detokenizer.flush() == ""


def test_bytes_of_a_byte_level_vocabulary(tmp_path):
    tokenizer = Tokenizer.load(write_byte_level(tmp_path))
    detokenizer = tokenizer.detokenizer()
    smile = tokenizer.encode("🙂", add_special_tokens=False)
    letter = tokenizer.encode("x", add_special_tokens=False)
    assert len(smile) == 4
    assert [detokenizer.push([token_id]) for token_id in smile] == ["", "", "", "🙂"]
    assert detokenizer.push(smile[:3]) == ""
    assert detokenizer.push(letter) == MARK + "x"  # a broken sequence is one mark here
    assert detokenizer.text_ends == [1, 1, 1, 1, 2, 2, 2, 3]
    assert detokenizer.push(smile[:1]) == ""
    assert detokenizer.push(smile[:1]) == MARK
    assert detokenizer.text_ends[8:] == [4]
    assert detokenizer.flush() == MARK
    assert detokenizer.text_ends[8:] == [4, 5]


@pytest.mark.parametrize("rule", ByteRule)
def test_only_spaces_in_front_of_the_text_are_dropped(rule):
    fragments = [" ", b" ", " x", b" y", "", None]
    detokenizer = IncrementalDetokenizer(Decoding(fragments.__getitem__, rule, strip_left=2))
    text = detokenizer.push([4, 5, 0, 1, 2, 3, 0]) + detokenizer.flush()
    assert text == " x y "
    assert detokenizer.text_ends == [0, 0, 0, 0, 2, 4, 5]


@pytest.mark.parametrize("rule", ByteRule)
def test_the_cost_of_an_id_does_not_grow(rule):
    looked_up = []

    def fragment(token_id: int) -> str | bytes:
        looked_up.append(token_id)
        return "漢".encode()[token_id % 3 :][:1] if token_id % 7 else " text"

    detokenizer = IncrementalDetokenizer(Decoding(fragment, rule, strip_left=1))
    longest = 0
    for token_id in range(20_000):
        detokenizer.push([token_id])
        longest = max(longest, len(detokenizer._bytes), len(detokenizer._held))
    assert looked_up == list(range(20_000))
    assert longest <= 6
