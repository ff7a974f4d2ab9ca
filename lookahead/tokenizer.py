"""A checkpoint's tokenizer: text to ids, ids to text, messages to ids.

Knows which files of a checkpoint directory say what about its text. Does not know how a vocabulary
splits text, what a model is, or where generated text stops.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from lookahead.chat_template import TEMPLATE_FILE, ChatTemplate, find_chat_template
from lookahead.detokenizer import IncrementalDetokenizer
from lookahead.errors import InputError
from lookahead.json_file import read_json_object
from lookahead.vocabulary import AddedToken, Vocabulary, VocabularySettings
from lookahead.vocabulary_json import JsonVocabulary
from lookahead.vocabulary_sentencepiece import SentencePieceVocabulary

# add_bos_token and add_eos_token are settings of these classes. Checkpoints of any other class may
# carry them too, but there the post-processor of tokenizer.json alone has always counted.
FLAG_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Tokenizer:
    """Text and ids of one checkpoint."""

    def __init__(
        self, directory: Path, vocabulary: Vocabulary, chat_template: ChatTemplate | None
    ) -> None:
        self._directory = directory
        self._vocabulary = vocabulary
        self._chat_template = chat_template

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer of a checkpoint directory: tokenizer.json, or else tokenizer.model."""
        directory = Path(path)
        json_path = directory / "tokenizer.json"
        model_path = directory / "tokenizer.model"
        if not json_path.is_file() and not model_path.is_file():
            raise InputError(
                f"no tokenizer in {directory}: looked for tokenizer.json and tokenizer.model; "
                "give the directory of a checkpoint that has one of them"
            )
        config = read_json_object(directory / "tokenizer_config.json", optional=True)
        settings = _read_settings(directory, config)
        vocabulary: Vocabulary
        if json_path.is_file() and config.get("tokenizer_class") not in FLAG_CLASSES:
            settings = replace(settings, add_bos=None, add_eos=None)
        if json_path.is_file():
            vocabulary = JsonVocabulary(json_path, settings)
        else:
            vocabulary = SentencePieceVocabulary(model_path, settings)
        found = find_chat_template(directory, config)
        if found is None:
            return cls(directory, vocabulary, None)
        return cls(directory, vocabulary, ChatTemplate(*found, vocabulary.special_tokens))

    @property
    def vocab_size(self) -> int:
        """The highest id, plus one. A model may have more rows than that."""
        return self._vocabulary.size

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def token_to_id(self, text: str) -> int | None:
        """The id of the one token that is written `text`, None if there is none."""
        return self._vocabulary.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written in it become their own ids; `add_special_tokens`
        puts around it those the checkpoint asks for, usually the beginning-of-text token."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has half a character ({text[error.start]!a}) at position {error.start}; "
                "expected Unicode text; was it read from something that is not UTF-8?"
            ) from error
        return self._vocabulary.encode(text, add_special_tokens)

    def encode_behind(self, text: str) -> list[int]:
        """Ids of `text` where it goes on from other text, and none of the special tokens that a text
        begins or ends with: a vocabulary that begins every text with a space does not begin this one
        so."""
        ids = self.encode(text, add_special_tokens=False)
        if not self._vocabulary.decoding.strip_left:
            return ids
        # The space then stands before a character that the text's first ones do not join.
        for character in "\n.;":
            begin = self.encode(character, add_special_tokens=False)
            both = self.encode(character + text, add_special_tokens=False)
            if both[: len(begin)] == begin:
                return both[len(begin) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self) -> IncrementalDetokenizer:
        """What `decode` gives, a few ids at a time."""
        return IncrementalDetokenizer(self._vocabulary.decoding)

    def require_chat_template(self) -> ChatTemplate:
        """The chat template. Raises InputError where there is none."""
        if self._chat_template is None:
            raise InputError(
                f"a chat needs a chat template and {self._directory} has none: looked for "
                f"{TEMPLATE_FILE} and for chat_template in tokenizer_config.json; take a checkpoint "
                "that was made for chats, or give plain prompts (without --chat)"
            )
        return self._chat_template

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The chat as the text the model was trained on, up to where its answer begins."""
        return self.require_chat_template().render(messages)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of `render_chat`. The template has written all special tokens itself."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def _named_id(self, name: str) -> int | None:
        token = self._vocabulary.special_tokens.get(name)
        return None if token is None else self._vocabulary.token_to_id(token)


def _read_settings(directory: Path, config: Mapping[str, Any]) -> VocabularySettings:
    config_path = directory / "tokenizer_config.json"
    map_path = directory / "special_tokens_map.json"
    token_map = read_json_object(map_path, optional=True)
    special_tokens = _named_tokens(map_path, token_map)
    special_tokens |= _named_tokens(config_path, config)
    also_special = [*_more_special_tokens(map_path, token_map)]
    also_special += _more_special_tokens(config_path, config)
    added = {token.id: token for token in _listed_tokens(directory / "added_tokens.json")}
    added |= {token.id: token for token in _described_tokens(config_path, config)}
    add_prefix_space = _flag(config_path, config, "add_prefix_space")
    return VocabularySettings(
        special_tokens=special_tokens,
        also_special=tuple(also_special),
        added_tokens=tuple(added.values()),
        add_bos=_flag(config_path, config, "add_bos_token"),
        add_eos=_flag(config_path, config, "add_eos_token"),
        # Checkpoints that say nothing are older than the flag, or LLaMA's own.
        legacy=_flag(config_path, config, "legacy") is not False,
        add_prefix_space=add_prefix_space is not False,
    )


def _named_tokens(path: Path, fields: Mapping[str, Any]) -> dict[str, str | None]:
    """`bos_token` and its like, each written as text or as an object with "content"."""
    tokens: dict[str, str | None] = {}
    for name in (f"{stem}_token" for stem in NAMED_TOKENS):
        if name not in fields:
            continue
        token = fields[name]
        content = token.get("content") if isinstance(token, dict) else token
        if content is not None and not _is_text(content):
            raise InputError(
                f'{path}: {name} is {json.dumps(token)}; expected text, an object with "content", '
                "or null"
            )
        tokens[name] = content
    return tokens


def _more_special_tokens(path: Path, fields: Mapping[str, Any]) -> Iterator[str]:
    """`additional_special_tokens`, since renamed: special tokens that have no name."""
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = fields.get(name)
        if tokens is None:
            continue
        if not isinstance(tokens, list | dict):
            raise InputError(
                f"{path}: {name} is {json.dumps(tokens)[:80]}; expected a list of text, an object "
                "of names and text, or null"
            )
        for token in tokens.values() if isinstance(tokens, dict) else tokens:
            content = token.get("content") if isinstance(token, dict) else token
            if not _is_text(content):
                raise InputError(
                    f"{path}: {name} holds {json.dumps(token)}; expected a list of text"
                )
            yield content


def _described_tokens(path: Path, config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """`added_tokens_decoder`: {"32000": {"content": ..., "special": ...}}."""
    try:
        described = config.get("added_tokens_decoder")
        for token_id, token in ({} if described is None else described).items():
            special, strip_left, strip_right, single_word = (
                bool(_flag(path, token, name))
                for name in ("special", "lstrip", "rstrip", "single_word")
            )
            if not token_id.isdecimal() or not _is_text(token["content"]):
                raise ValueError(f"{token_id!r}: {json.dumps(token)[:80]}")
            yield AddedToken(
                int(token_id), token["content"], special, strip_left, strip_right, single_word
            )
    except InputError as error:
        raise InputError(f"{error}, in added_tokens_decoder") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: added_tokens_decoder is malformed ({type(error).__name__}: {error}); "
            'expected {"id": {"content": text, "special": true or false}}'
        ) from error


def _listed_tokens(path: Path) -> Iterator[AddedToken]:
    """`added_tokens.json`: {"<pad>": 32000}."""
    for content, token_id in read_json_object(path, optional=True).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise InputError(
                f"{path}: the id of {content!r} is {repr(token_id)[:80]}; expected a whole number "
                "of at least 0"
            )
        yield AddedToken(token_id, content, special=False)


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether it is text that a vocabulary can hold. JSON can write half a character."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _flag(path: Path, config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{path}: {name} is {json.dumps(value)}; expected true, false or null")
    return value
