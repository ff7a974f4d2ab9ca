"""A conversation: messages, the ids that they come to, and what of them the model has read already.

The text of the turns so far stays in the cache and its n-grams in the pool, so a new turn reads only
what is new. Knows how the ids of a turn follow from those of the turn before; what of them is still in
the cache is the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from lookahead.errors import InputError
from lookahead.request_options import RequestOptions
from lookahead.stream import OnLogits, Stream
from lookahead.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Message = dict[str, str]  # {"role": ..., "content": ...}


class StartTurn(Protocol):
    """Starts the answer to a prompt's ids. What these have in common with the text that the stream
    `before` left in the cache is not read again, if nothing has run since."""

    def __call__(
        self,
        token_ids: list[int],
        before: Stream | None,
        *,
        on_logits: OnLogits | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream: ...


@dataclass(frozen=True)
class Turn:
    """The last prompt and the answer to it.

    Attributes:
        rendered: the prompt as the template wrote it.
        token_ids: its ids.
        is_rewritten: whether what stands before the new message is no longer the prompt and answer that
            were there, so that all ids were made anew.
        stream: the answer.
        before: the turn that this one goes on from.
    """

    rendered: str
    token_ids: list[int]
    is_rewritten: bool
    stream: Stream
    before: Turn | None

    @property
    def is_void(self) -> bool:
        """Whether it was ended before the answer began: then it is as if nothing had been said."""
        result = self.stream.result
        ended = self.stream.is_done and result.finish_reason == "interrupted"
        return ended and not result.token_ids

    @property
    def answer_ids(self) -> list[int]:
        """Ids of the answer so far, without the one that ended the text."""
        result = self.stream.result
        return result.token_ids[: -1 if result.finish_reason == "eos" else None]


class Conversation:
    """Messages, and answers to them one after the other. `Engine.conversation` makes one.

    Other requests may run between two turns; then the next turn reads everything again.
    """

    def __init__(
        self, tokenizer: Tokenizer, start: StartTurn, max_length: int, system: str | None = None
    ) -> None:
        """`max_length`: the tokens that a prompt and its answer have room for.

        Raises:
            InputError: there is no chat template, or `system` is not text.
        """
        tokenizer.require_chat_template()
        self._tokenizer = tokenizer
        self._start = start
        self._max_length = max_length
        self._system: str | None = None
        self._said: list[Message] = []  # all before the answer to the last one
        self._turn: Turn | None = None
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message. Another one takes its place, before all that was said, from the next
        turn on."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None:
            self._check_text(text)
        self._system = text

    @property
    def messages(self) -> list[Message]:
        """All of them, the system message first; an answer once it has ended or was closed."""
        return self._under_system(self._history)

    @property
    def _history(self) -> list[Message]:
        """All but the system message."""
        if self._turn is None or not self._turn.stream.is_done:
            return list(self._said)
        if self._turn.is_void:
            return self._said[:-1]
        return [*self._said, _message("assistant", self._turn.stream.result.text)]

    def _under_system(self, messages: Sequence[Message]) -> list[Message]:
        system = [] if self._system is None else [_message("system", self._system)]
        return [*system, *(dict(message) for message in messages)]

    @property
    def turn(self) -> Turn | None:
        """The last turn; None before the first one."""
        return self._turn

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of the last turn's prompt that the model had to read for it."""
        return 0 if self._turn is None else self._turn.stream.answer.prefilled_tokens

    @property
    def reused_tokens(self) -> int:
        """Tokens of the last turn's prompt that were in the cache."""
        return 0 if self._turn is None else self._turn.stream.answer.kept.in_cache

    @property
    def is_rewritten(self) -> bool:
        """Whether the last turn's prompt does not begin with the prompt and answer before it: the
        template wrote these differently this time, or the system message has changed."""
        return self._turn is not None and self._turn.is_rewritten

    def say(
        self, text: str, *, on_logits: OnLogits | None = None, **options: Unpack[RequestOptions]
    ) -> Stream:
        """Add a message and start the answer. Options as for `Engine.stream`.

        Returns:
            An iterator of chunks. When it has ended or was closed, its text is the next message; if it
            was closed before the answer began, this message is left out.

        Raises:
            InputError: something given cannot be used, the conversation no longer fits the context, or
                an answer is still running. The message is not added then.
        """
        if self._turn is not None and not self._turn.stream.is_done:
            raise InputError(
                "the answer to the last message is still running: read it to its end or close it first"
            )
        self._check_text(text)
        said = [*self._history, _message("user", text)]
        rendered = self._tokenizer.render_chat(self._under_system(said))
        token_ids, is_rewritten = self._ids_of(rendered)
        if len(token_ids) >= self._max_length:
            raise InputError(
                f"with this message the conversation has {len(token_ids)} tokens, at most "
                f"{self._max_length - 1} fit in a context of {self._max_length}: shorten the message, "
                "or begin anew with reset(), /reset in the chat"
            )
        before = None if self._turn is None else self._turn.stream
        stream = self._start(token_ids, before, on_logits=on_logits, **options)
        self._said = said
        self._turn = Turn(rendered, token_ids, is_rewritten, stream, self._last_turn)
        return stream

    def close(self) -> None:
        """End the answer that is running, if one is; what there is of it is the next message. Where
        there is nothing of it, the message that it answers is left out too."""
        if self._turn is not None:
            self._turn.stream.close()

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.close()
        self._said = []
        self._turn = None

    def _ids_of(self, rendered: str) -> tuple[list[int], bool]:
        """Ids of a prompt, and whether it is not what was there before with more behind it.

        An answer's ids stay as the model chose them: its text alone may come to others.
        """
        turn = self._last_turn
        if turn is not None:
            for begin in self._beginnings(turn):
                if rendered.startswith(begin):
                    rest = self._tokenizer.encode_behind(rendered[len(begin) :])
                    return [*turn.token_ids, *turn.answer_ids, *rest], False
        ids = self._tokenizer.encode(rendered, add_special_tokens=False)
        return ids, turn is not None

    @property
    def _last_turn(self) -> Turn | None:
        """The last one that counts, without those before it."""
        turn = self._turn
        if turn is not None and turn.is_void:
            turn = turn.before
        return None if turn is None else replace(turn, before=None)

    def _beginnings(self, turn: Turn) -> Iterator[str]:
        """What a next prompt may begin with if it goes on from this turn: a vocabulary may leave out
        the space that a text begins with, but not that of an answer behind its prompt."""
        decode, prompt, answer = self._tokenizer.decode, turn.token_ids, turn.answer_ids
        yield turn.rendered + decode([*prompt, *answer])[len(decode(prompt)) :]
        yield turn.rendered + decode(answer)

    def _check_text(self, text: str) -> None:
        """Raise InputError for what is not text."""
        if not isinstance(text, str):
            raise InputError(f"a message must be text, got {text!r:.80}")
        self._tokenizer.encode(text)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
