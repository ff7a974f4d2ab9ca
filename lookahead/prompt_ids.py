"""What may be given as a prompt, and the token ids that it comes to."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, SupportsIndex

from lookahead.config import ModelConfig
from lookahead.errors import InputError
from lookahead.tokenizer import Tokenizer

Prompt = str | Sequence[int]
NO_LISTS = (str, bytes, Mapping, Set)  # of prompts or ids, though they can be iterated over


def as_prompts(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether a list of prompts was given rather than one prompt."""
    if isinstance(prompt, NO_LISTS) or not isinstance(prompt, Iterable):
        return [prompt], False
    items: list[Any] = list(prompt)
    return ([items], False) if all(map(_is_id, items)) else (items, True)


def _is_id(item: object) -> bool:
    """Whether it is one number: an array of one number can be one too, but is a prompt of its own."""
    return isinstance(item, SupportsIndex) and getattr(item, "ndim", 0) == 0


def prompt_ids(
    prompt: Prompt, tokenizer: Tokenizer, config: ModelConfig, max_length: int
) -> list[int]:
    """Ids of one prompt. Raises InputError where there are none, too many, or unknown ones."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else _plain_ids(prompt)
    if not ids:
        raise InputError(
            "the prompt is empty: after tokenising it has no tokens, expected at least 1"
        )
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise InputError(
                f"prompt id {token} is not in the vocabulary, expected 0..{config.vocab_size - 1}"
            )
    if len(ids) >= max_length:
        most = config.max_position_embeddings
        can_raise = f" or raise max_length (at most {most})" if max_length < most else ""
        raise InputError(
            f"the prompt has {len(ids)} tokens, at most {max_length - 1} fit in a context of "
            f"{max_length}; shorten it{can_raise}"
        )
    return ids


def _plain_ids(prompt: Sequence[int]) -> list[int]:
    """Plain numbers of ids that may come from any library."""
    try:
        if isinstance(prompt, NO_LISTS):
            raise TypeError("it has no order, or bytes are neither")
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise InputError(
            f"a prompt must be text or a list of token ids, got {prompt!r:.80}"
        ) from error
