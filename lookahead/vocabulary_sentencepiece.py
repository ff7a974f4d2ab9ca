"""`tokenizer.model`, read through SentencePiece.

Knows how added tokens are cut out of a text that SentencePiece then splits, and where a stretch of
text gets a space in front. Control pieces such as `<s>` are added tokens here: SentencePiece itself
never finds them in a text, but chat templates write them there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import sentencepiece

from lookahead.detokenizer import ByteRule, Decoding
from lookahead.errors import InputError, one_line
from lookahead.vocabulary import AddedToken, VocabularySettings, with_ids

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how pieces write a space
# A serialized model with these bytes appended is that model with one field changed, for the last
# value counts: normalizer_spec (field 3) { add_dummy_prefix (field 3): false }.
WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceVocabulary:
    """The vocabulary in a `tokenizer.model`. Unless the settings say otherwise `encode` adds the
    beginning-of-text token and no end-of-text token, as LLaMA's own code does."""

    def __init__(self, path: Path, settings: VocabularySettings) -> None:
        self._first, self._later = _load(path, settings)
        self._num_pieces: int = self._first.get_piece_size()
        self._added = {token.id: token for token in self._control_tokens()}
        self._added |= {token.id: token for token in settings.added_tokens}
        self._added_ids = {token.content: token.id for token in self._added.values()}
        names = {**self._own_names(), **settings.special_tokens}
        self.special_tokens = with_ids(names, self.token_to_id)
        self._make_special((*self.special_tokens.values(), *settings.also_special))
        self._added_pattern = _any_of(self._added.values())
        self.size = max(self._num_pieces - 1, *self._added) + 1
        self._prefix = self._ids_of("bos_token") if settings.add_bos is not False else []
        self._suffix = self._ids_of("eos_token") if settings.add_eos else []
        self.decoding = Decoding(self._fragment, ByteRule.BYTE, self._dummy_prefix_length())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        processor = self._first
        for part in self._split(text):
            if isinstance(part, AddedToken):
                ids.append(part.id)
            else:
                ids.extend(processor.encode(part, out_type=int))
            processor = self._later
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def token_to_id(self, token: str) -> int | None:
        if token in self._added_ids:
            return self._added_ids[token]
        piece_id: int = self._first.piece_to_id(token)
        return piece_id if self._first.id_to_piece(piece_id) == token else None

    def _split(self, text: str) -> Iterator[str | AddedToken]:
        """Added tokens, and the stretches of text between them that are not empty."""
        start = 0
        strip_left = False
        for match in self._added_pattern.finditer(text):
            token = self._added[self._added_ids[match[0]]]
            stretch = text[start : match.start()]
            stretch = stretch.lstrip() if strip_left else stretch
            stretch = stretch.rstrip() if token.strip_left else stretch
            if stretch:
                yield stretch
            yield token
            start = match.end()
            strip_left = token.strip_right
        if rest := text[start:].lstrip() if strip_left else text[start:]:
            yield rest

    def _control_tokens(self) -> Iterator[AddedToken]:
        for piece_id in range(self._num_pieces):
            if self._first.is_control(piece_id) or self._first.is_unknown(piece_id):
                yield AddedToken(piece_id, self._first.id_to_piece(piece_id), special=True)

    def _make_special(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            token_id = self.token_to_id(token)
            if token_id is not None:
                added = self._added.get(token_id, AddedToken(token_id, token, special=True))
                self._added[token_id] = replace(added, special=True)
                self._added_ids[token] = token_id

    def _own_names(self) -> dict[str, str]:
        """The special tokens that the model file itself names."""
        ids = {
            "bos_token": self._first.bos_id(),
            "eos_token": self._first.eos_id(),
            "unk_token": self._first.unk_id(),
        }
        return {name: self._first.id_to_piece(id_) for name, id_ in ids.items() if id_ >= 0}

    def _ids_of(self, name: str) -> list[int]:
        token_id = self.token_to_id(self.special_tokens.get(name, ""))
        return [] if token_id is None else [token_id]

    def _fragment(self, token_id: int) -> str | bytes | None:
        added = self._added.get(token_id)
        if added is not None:
            return None if added.special else added.content
        if token_id >= self._num_pieces:
            return None
        piece: str = self._first.id_to_piece(token_id)
        if self._first.is_byte(token_id):
            return bytes.fromhex(piece[len("<0x") : -len(">")])
        return piece.replace(SPACE, " ")

    def _dummy_prefix_length(self) -> int:
        """Spaces that decoding drops in front of a text, because encoding put them there."""
        space_id = self.token_to_id(SPACE)
        if space_id is None:
            return 1
        return 3 - len(self._first.decode([space_id] * 3))


def _load(
    path: Path, settings: VocabularySettings
) -> tuple[sentencepiece.SentencePieceProcessor, sentencepiece.SentencePieceProcessor]:
    """The processors of the first stretch of a text and of those after an added token."""
    try:
        model = path.read_bytes()
        if not model:  # the library would take it for no model at all, and say nothing
            raise RuntimeError("the file is empty")
        if not settings.add_prefix_space:
            model += WITHOUT_DUMMY_PREFIX
        first = sentencepiece.SentencePieceProcessor(model_proto=model)
        if settings.legacy:
            return first, first
        later = sentencepiece.SentencePieceProcessor(model_proto=model + WITHOUT_DUMMY_PREFIX)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a SentencePiece model ({one_line(error)}); "
            "expected LLaMA's tokenizer.model; download it again"
        ) from error
    return first, later


def _any_of(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """Finds any of `tokens`, the longest where several begin."""
    patterns = [
        rf"(?<!\w){re.escape(token.content)}(?!\w)"
        if token.single_word
        else re.escape(token.content)
        for token in sorted(tokens, key=lambda token: len(token.content), reverse=True)
        if token.content
    ]
    return re.compile("|".join(patterns) or "(?!)")
