"""Ids to text, a few ids at a time, without ever showing half a character.

Knows how the fragments of tokens (text, or raw bytes) join into text, and where the text of each id
ends. Does not know vocabularies, special tokens, or where text stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ByteRule(Enum):
    """What becomes of bytes that are not UTF-8. The three kinds of vocabulary differ in this."""

    SEQUENCE = auto()  # byte-level: one mark for each broken sequence of bytes
    BYTE = auto()  # SentencePiece: one mark for each byte of a broken sequence
    RUN = auto()  # byte fallback: one mark for each byte of a run of bytes that is broken anywhere


@dataclass(frozen=True)
class Decoding:
    """How ids of one vocabulary become text.

    `fragment(id)` is the id's text or its raw bytes; None for an id that is not shown at all, which
    does not end a run of bytes either. The first `strip_left` spaces of the whole text are dropped.
    """

    fragment: Callable[[int], str | bytes | None]
    byte_rule: ByteRule
    strip_left: int


class IncrementalDetokenizer:
    """Text of a growing sequence of ids. The cost of an id does not depend on what came before it.

    All that `push` and `flush` return, joined, is the text of all ids pushed. `text_ends[i]` is the
    number of characters of that text after which nothing of the i-th pushed id is missing; the list
    is shorter than the number of ids pushed while the last ones wait for the rest of a character.
    Ids that are not shown end where the id before them ends.
    """

    def __init__(self, decoding: Decoding) -> None:
        self.text_ends: list[int] = []
        self._decoding = decoding
        self._strip_left = decoding.strip_left
        self._length = 0
        self._bytes = bytearray()  # those whose characters cannot be told yet
        self._held: deque[int] = deque()  # for each id not yet out, where in _bytes it ends

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is now final and was not before."""
        return "".join([self._push_one(token_id) for token_id in ids])

    def flush(self) -> str:
        """The rest: no more ids will come, so bytes of an unfinished character are broken ones."""
        return self._settle_bytes(final=True)

    def _push_one(self, token_id: int) -> str:
        fragment = self._decoding.fragment(token_id)
        if isinstance(fragment, str):
            text = self._settle_bytes(final=True) + self._show(fragment)
            self.text_ends.append(self._length)
            return text
        if fragment is not None:
            self._bytes += fragment
        self._held.append(len(self._bytes))
        return self._settle_bytes(final=False)

    def _settle_bytes(self, final: bool) -> str:
        shown = []
        consumed = 0
        for character, size in _characters(self._bytes, self._decoding.byte_rule, final):
            shown.append(self._show(character))
            consumed += size
            self._end_ids(consumed)
        if consumed:
            del self._bytes[:consumed]
            self._held = deque(end - consumed for end in self._held)
        if not self._bytes:
            self._end_ids(0)
        return "".join(shown)

    def _end_ids(self, consumed: int) -> None:
        while self._held and self._held[0] <= consumed:
            self._held.popleft()
            self.text_ends.append(self._length)

    def _show(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        self._length += len(text)
        return text


def _characters(data: bytearray, rule: ByteRule, final: bool) -> Iterator[tuple[str, int]]:
    """The characters of `data` that no later byte can change, each with its number of bytes."""
    if rule is ByteRule.RUN:
        # One broken byte later in the run would turn all of it into marks: nothing is sure yet.
        return _run_characters(bytes(data)) if final else iter(())
    return _stream_characters(bytes(data), rule, final)


def _run_characters(data: bytes) -> Iterator[tuple[str, int]]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
        yield from ((REPLACEMENT, 1) for _ in data)
    yield from ((character, len(character.encode("utf-8"))) for character in text)


def _stream_characters(data: bytes, rule: ByteRule, final: bool) -> Iterator[tuple[str, int]]:
    start = 0
    while start < len(data):
        size = _sequence_length(data[start])
        sequence = data[start : start + size]
        try:
            yield sequence.decode("utf-8"), size
        except UnicodeDecodeError as error:
            unfinished = len(sequence) < size and error.end == len(sequence)
            if unfinished and not final:
                return
            size = 1 if rule is ByteRule.BYTE else error.end
            yield REPLACEMENT, size
        start += size


def _sequence_length(lead: int) -> int:
    """Bytes of the UTF-8 sequence that starts with `lead`; 1 also for a byte that starts none."""
    if 0xC2 <= lead <= 0xDF:
        return 2
    if 0xE0 <= lead <= 0xEF:
        return 3
    return 4 if 0xF0 <= lead <= 0xF4 else 1
