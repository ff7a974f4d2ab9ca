"""`tokenizer.json`, read through the tokenizers library.

Knows that file's post-processor (the special tokens around a text), added tokens and decoders. The
decoder is read rather than run, because the library's own can only decode whole texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from lookahead.detokenizer import ByteRule, Decoding
from lookahead.errors import InputError, one_line
from lookahead.vocabulary import VocabularySettings, with_ids


class JsonVocabulary:
    """The vocabulary in a `tokenizer.json`. What `encode` adds is what its post-processor says,
    except where add_bos_token or add_eos_token in the settings overrule it."""

    def __init__(self, path: Path, settings: VocabularySettings) -> None:
        self._path = path
        with _refusing(f"{path} is not a tokenizer.json that the tokenizers library can read"):
            self._backend = tokenizers.Tokenizer.from_file(str(path))
            self._backend.no_truncation()
            self._backend.no_padding()
            self._add_missing_tokens(settings)
        self.size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_tokens = with_ids(settings.special_tokens, self.token_to_id)
        special = {*self.special_tokens.values(), *settings.also_special}
        self.decoding = _read_decoding(self._backend, special, path)
        self._affixes = self._overruling_affixes(settings)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not add_special_tokens or self._affixes is None:
            return self._own_ids(text, add_special_tokens)
        prefix, suffix = self._affixes
        return [*prefix, *self._own_ids(text, add_special_tokens=False), *suffix]

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _own_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """What the file alone makes of `text`."""
        what = f"{self._path} cannot turn the text {text[:40]!a} into ids"
        with _refusing(f"{what}, expected one with an id for every text"):
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _add_missing_tokens(self, settings: VocabularySettings) -> None:
        """Tokens that only the files beside tokenizer.json name are matched in the text too."""
        for token in sorted(settings.added_tokens, key=lambda token: token.id):
            # The library numbers them itself; one that would get another id is left out.
            if token.id == self._backend.get_vocab_size(with_added_tokens=True):
                added = tokenizers.AddedToken(
                    token.content,
                    single_word=token.single_word,
                    lstrip=token.strip_left,
                    rstrip=token.strip_right,
                    normalized=False,
                    special=token.special,
                )
                self._backend.add_tokens([added])
        # Adding one again would forget how the file says to match it.
        already = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        self._backend.add_special_tokens(
            [
                tokenizers.AddedToken(token, normalized=False, special=True)
                for token in (*settings.special_tokens.values(), *settings.also_special)
                if token and token not in already and self.token_to_id(token) is not None
            ]
        )

    def _overruling_affixes(
        self, settings: VocabularySettings
    ) -> tuple[list[int], list[int]] | None:
        """Ids before and after every text, or None to leave that to the post-processor."""
        bos, eos = (self._ids_of(name) for name in ("bos_token", "eos_token"))
        own = self._own_ids("", add_special_tokens=True)
        own_bos = bool(bos) and own[:1] == bos
        own_eos = bool(eos) and own[own_bos:][-1:] == eos
        add_bos = own_bos if settings.add_bos is None else settings.add_bos
        add_eos = own_eos if settings.add_eos is None else settings.add_eos
        if (add_bos and bool(bos), add_eos and bool(eos)) == (own_bos, own_eos):
            return None
        return bos if add_bos else [], eos if add_eos else []

    def _ids_of(self, name: str) -> list[int]:
        token = self.special_tokens.get(name)
        token_id = None if token is None else self.token_to_id(token)
        return [] if token_id is None else [token_id]


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn whatever the library raises into an InputError that says `what` is wrong."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    # The library raises bare Exception. Its panics, which files that contradict themselves cause,
    # are not even that but BaseException.
    except BaseException as error:
        raise InputError(f"{what} ({one_line(error)}); download it again") from error


@dataclass(frozen=True)
class _Fallback:
    """The decoder of vocabularies made from SentencePiece: text, with `<0x0A>` for a byte."""

    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False

    def __call__(self, token: str) -> str | bytes:
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token) if self.byte_fallback else None
        return token if byte is None else bytes.fromhex(byte[1])


class _ByteLevel:
    """The decoder of byte-level vocabularies, which write every byte as a printable character."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in printable]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes |= {chr(256 + place): byte for place, byte in enumerate(hidden)}

    def __call__(self, token: str) -> bytes:
        try:
            return bytes([self._bytes[character] for character in token])
        except KeyError:  # an added token stands as it is written
            return token.encode("utf-8")


def _read_decoding(
    backend: tokenizers.Tokenizer, special_tokens: Collection[str], path: Path
) -> Decoding:
    special_ids = {
        token_id
        for token_id, token in backend.get_added_tokens_decoder().items()
        if token.special or token.content in special_tokens
    }
    if backend.decoder is None:  # the library then joins tokens by spaces
        return Decoding(_shown(backend, special_ids, lambda token: f" {token}"), ByteRule.RUN, 1)
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Decoding(_shown(backend, special_ids, _ByteLevel()), ByteRule.SEQUENCE, 0)
    fallback, strip_left = _read_fallback(steps, path)
    return Decoding(_shown(backend, special_ids, fallback), ByteRule.RUN, strip_left)


def _shown(
    backend: tokenizers.Tokenizer,
    special_ids: Collection[int],
    decode: Callable[[str], str | bytes],
) -> Callable[[int], str | bytes | None]:
    def fragment(token_id: int) -> str | bytes | None:
        token = None if token_id in special_ids else backend.id_to_token(token_id)
        return None if token is None else decode(token)

    return fragment


def _read_fallback(steps: list[dict[str, Any]], path: Path) -> tuple[_Fallback, int]:
    """Replace..., ByteFallback, Fuse, Strip; each may be missing. Refuses what it cannot honour."""
    replacements = []
    strip_left = 0
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    seen: list[str] = []
    for step in steps:
        kind = step["type"]
        known = kind in order and all(order.index(before) <= order.index(kind) for before in seen)
        if kind == "Replace" and known and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and step["content"] == " " and not step["stop"] and "Fuse" in seen:
            strip_left += step["start"]
        elif kind == "Replace" or kind == "Strip" or not known:
            raise InputError(
                f"{path} has the decoder {json.dumps(step)} in a place where it is not supported; "
                f"expected ByteLevel alone, or of {', '.join(order)} some in this order; convert "
                "the tokenizer to that form"
            )
        seen.append(kind)
    return _Fallback(tuple(replacements), "ByteFallback" in seen), strip_left
