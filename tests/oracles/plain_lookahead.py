"""Lookahead decoding with plain lists, one call of the model per row.

Knows the rules of the method: rows as a tree, verification, harvest, shift, commit, pool, end of
text. Knows no tensors, no masks, no caches; the model is a function from ids to the next token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlainStep:
    """What one step saw and did. Rows are numbered as in a step's batch; row 0 is x.

    With W >= 1 row (l, c) is l * W + c and depth d of candidate g is W * (N - 1) + g * (N - 1) + d.
    With W = 0 row 0 is alone and depth d of candidate g is 1 + g * (N - 1) + d. Only candidates
    found in the pool have rows. `accepted` and `predictions` are from before the cut.
    """

    number: int  # 1 for the first step of the request
    committed_before: int
    window: list[list[int]]  # levels by columns
    candidates: list[tuple[int, ...]]  # most recent first
    origins: list[str]  # of each candidate: "prompt", "window" or "output"
    tokens: list[int]  # by row
    parents: list[int]  # by row; -1 for row 0
    predictions: dict[int, int]  # next token after row 0, the last level and accepted rows
    accepted: list[int]  # rows from row 0 to the winner, both included
    emitted: list[int]
    window_after: list[list[int]]
    pool_after: dict[int, list[tuple[int, ...]]]  # continuations by key, most recent first
    committed_after: int
    text_after: list[int]  # prompt and output


class PlainLookahead:
    """Decodes one request step by step; `text` is the prompt and the output so far."""

    def __init__(
        self,
        next_token: Callable[[tuple[int, ...]], int],
        prompt: list[int],
        initial_window: list[list[int]],
        window: int,
        ngram: int,
        guesses: int,
        prompt_ngrams: bool,
        eos_ids: Sequence[int],
        max_new_tokens: int,
        max_length: int,
    ) -> None:
        if not prompt:
            raise ValueError("expected a prompt of at least one token, got none")
        if ngram < 2 or window < 0 or guesses < 0:
            raise ValueError(
                f"expected ngram >= 2, window >= 0, guesses >= 0, got {ngram}, {window}, {guesses}"
            )
        shape = [len(level) for level in initial_window]
        if window and shape != [window] * (ngram - 1):
            raise ValueError(f"expected {ngram - 1} levels of {window} columns, got {shape}")
        self.next_token = next_token
        self.text = list(prompt)
        self.prompt_length = len(prompt)
        self.committed = len(prompt) - 1
        self.num_columns, self.ngram, self.guesses = window, ngram, guesses
        self.eos_ids = set(eos_ids)
        # the length of text at which a request ends, whichever limit is met first
        self.end = min(self.prompt_length + max_new_tokens, max_length)
        self.finished = self.prompt_length >= self.end
        self.num_steps = 0
        # key -> [(continuation, origin)], most recent first
        self.pool: dict[int, list[tuple[tuple[int, ...], str]]] = {}
        self.window: list[list[int]] = []
        if window:
            self.window = [list(level) for level in initial_window]
            self.window[0][0] = self.text[-1]
        if prompt_ngrams:
            for end in range(ngram, len(prompt) + 1):
                self._insert(prompt[end - ngram : end], "prompt")

    def step(self) -> PlainStep:
        if self.finished:
            raise RuntimeError("expected an unfinished request, got a step after its end")
        self.num_steps += 1
        committed_before = self.committed
        window_before = [list(level) for level in self.window]
        x = self.text[self.committed]
        found = self.pool.get(x, [])
        candidates = [continuation for continuation, _ in found]
        tokens, parents = self._rows(x, candidates)

        predictions = {0: self._predict(0, tokens, parents)}
        accepted = self._verify(tokens, parents, predictions)
        # tokens on the path after x, then the bonus token
        emitted = [tokens[row] for row in accepted[1:]] + [predictions[accepted[-1]]]
        emitted = self._cut(emitted)

        new_level = []
        for column in range(self.num_columns):
            row = (self.ngram - 2) * self.num_columns + column
            predictions[row] = self._predict(row, tokens, parents)
            new_level.append(predictions[row])
        self._harvest(new_level, emitted)  # appends the emitted tokens to the text
        self.committed += len(emitted)
        self._shift(new_level)

        return PlainStep(
            number=self.num_steps,
            committed_before=committed_before,
            window=window_before,
            candidates=candidates,
            origins=[origin for _, origin in found],
            tokens=tokens,
            parents=parents,
            predictions=predictions,
            accepted=accepted,
            emitted=emitted,
            window_after=[list(level) for level in self.window],
            pool_after={key: [entry[0] for entry in kept] for key, kept in self.pool.items()},
            committed_after=self.committed,
            text_after=list(self.text),
        )

    def _rows(self, x: int, candidates: list[tuple[int, ...]]) -> tuple[list[int], list[int]]:
        """Token and parent of every row, in order of row number."""
        tokens, parents = [], []
        if self.num_columns == 0:
            tokens.append(x)
            parents.append(-1)
        for level in range(len(self.window)):
            for column in range(self.num_columns):
                tokens.append(self.window[level][column])
                if level > 0:
                    parents.append((level - 1) * self.num_columns + column)
                else:
                    parents.append(column - 1)  # the column before; -1 for x itself
        for candidate in candidates:
            for depth, token in enumerate(candidate):
                parents.append(len(tokens) - 1 if depth > 0 else 0)
                tokens.append(token)
        return tokens, parents

    def _predict(self, row: int, tokens: list[int], parents: list[int]) -> int:
        """The model's next token after the committed text and the row's path from x."""
        path: list[int] = []
        while row >= 0:
            path.insert(0, tokens[row])
            row = parents[row]
        return self.next_token(tuple(self.text[: self.committed] + path))

    def _verify(
        self, tokens: list[int], parents: list[int], predictions: dict[int, int]
    ) -> list[int]:
        """The path of the deepest accepted row; adds the predictions of accepted rows."""
        paths = {0: [0]}
        first_candidate_row = max(1, self.num_columns * (self.ngram - 1))
        for row in range(first_candidate_row, len(tokens)):
            parent = parents[row]
            if parent in paths and tokens[row] == predictions[parent]:
                paths[row] = [*paths[parent], row]
                predictions[row] = self._predict(row, tokens, parents)
        best = paths[0]
        for row in sorted(paths):
            if len(paths[row]) > len(best):  # a later row must be deeper, not as deep
                best = paths[row]
        return best

    def _cut(self, emitted: list[int]) -> list[int]:
        """What of `emitted` belongs to the text; marks the request finished where it ends."""
        kept: list[int] = []
        for token in emitted:
            kept.append(token)
            if token in self.eos_ids or len(self.text) + len(kept) == self.end:
                self.finished = True
                break
        return kept

    def _harvest(self, new_level: list[int], emitted: list[int]) -> None:
        if self.num_steps >= self.ngram - 1:
            for column in range(self.num_columns):
                above = [level[column] for level in self.window]
                self._insert([*above, new_level[column]], "window")
        for token in emitted:
            self.text.append(token)
            if len(self.text) >= self.ngram:
                self._insert(self.text[-self.ngram :], "output")

    def _shift(self, new_level: list[int]) -> None:
        if self.num_columns == 0:
            return
        self.window = [*self.window[1:], list(new_level)]
        self.window[0][0] = self.text[self.committed]

    def _insert(self, ngram: list[int], origin: str) -> None:
        if self.guesses == 0:
            return
        key, continuation = ngram[0], tuple(ngram[1:])
        others = [entry for entry in self.pool.get(key, []) if entry[0] != continuation]
        self.pool[key] = [(continuation, origin), *others][: self.guesses]
