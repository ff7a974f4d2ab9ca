"""What the two kinds of vocabulary file have in common: their interface and their settings.

Knows no file format. `vocabulary_json.py` and `vocabulary_sentencepiece.py` each read one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lookahead.detokenizer import Decoding


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in the text as it is written, before anything else is split.

    `strip_left` and `strip_right` drop the white space around it; `single_word` wants no letter or
    digit beside it.
    """

    id: int
    content: str
    special: bool
    strip_left: bool = False
    strip_right: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class VocabularySettings:
    """What the small files beside the vocabulary say about it; None where they say nothing.

    `special_tokens` maps names such as `bos_token` to the token's text, or to None where a file
    says that there is none; `also_special` are those without a name. `legacy` and
    `add_prefix_space` matter to SentencePiece alone: whether every stretch of text between added
    tokens begins with a space of its own, or only the first, or none.
    """

    special_tokens: Mapping[str, str | None]
    also_special: tuple[str, ...] = ()
    added_tokens: tuple[AddedToken, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    legacy: bool = True
    add_prefix_space: bool = True


class Vocabulary(Protocol):
    """Text to ids and back for one checkpoint."""

    size: int  # the highest id, plus one
    special_tokens: dict[str, str]  # by name, those that have an id
    decoding: Decoding

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def token_to_id(self, token: str) -> int | None: ...


def with_ids(
    special_tokens: Mapping[str, str | None], token_to_id: Callable[[str], int | None]
) -> dict[str, str]:
    """The named special tokens that exist: some files name a padding token that has no id."""
    return {
        name: token
        for name, token in special_tokens.items()
        if token is not None and token_to_id(token) is not None
    }
