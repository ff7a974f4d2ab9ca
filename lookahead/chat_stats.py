"""What the answers of a conversation took, as lines for people."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from lookahead.results import Result


@dataclass(frozen=True)
class Figures:
    """Of one answer, or of several together.

    `prefilled` are the tokens of prompts that the model had to read, `reused` those that were in the
    cache from the turns before.
    """

    tokens: int = 0
    steps: int = 0
    decode_seconds: float = 0.0
    prefilled: int = 0
    reused: int = 0

    @classmethod
    def of(cls, result: Result, prefilled: int, reused: int) -> Figures:
        return cls(result.new_tokens, result.steps, result.decode_seconds, prefilled, reused)

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        per_step = self.tokens / self.steps if self.steps else 0.0
        per_second = self.tokens / self.decode_seconds if self.steps else 0.0
        return (
            f"{self.tokens} tokens, {self.steps} steps, {per_step:.2f} tokens/step, "
            f"{per_second:.1f} tokens/s; prompt: {self.prefilled} tokens prefilled, "
            f"{self.reused} reused"
        )


class SessionStats:
    """All answers of a session; a new conversation in it does not begin them anew."""

    def __init__(self) -> None:
        self._answers = 0
        self._session = Figures()
        self._last: tuple[Result, Figures] | None = None

    def add(self, result: Result, prefilled: int, reused: int) -> None:
        """Count an answer that has ended."""
        figures = Figures.of(result, prefilled, reused)
        self._answers += 1
        self._session += figures
        self._last = result, figures

    def __str__(self) -> str:
        if self._last is None:
            return "stats: there is no answer yet"
        result, figures = self._last
        shape = result.window, result.ngram, result.guesses
        answers = "1 answer" if self._answers == 1 else f"{self._answers} answers"
        lines = [
            f"(window, ngram, guesses): {shape}, {_reason(result)}",
            f"last answer: {figures}",
            f"session: {answers}, {self._session}",
        ]
        return "\n".join(f"stats: {line}" for line in lines)


def _reason(result: Result) -> str:
    """Why (W, N, G) are what they are."""
    return "autoregressive" if result.mode == "autoregressive" else result.choice
