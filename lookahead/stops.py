"""Streamed text that ends at a stop string.

Turns each step's ids into text, holds back what a stop string may yet take, and finds the first stop
string to become complete, so that where the text ends does not depend on how many tokens a step
brought. Knows nothing of how ids come about.
"""

from collections.abc import Sequence

from lookahead.detokenizer import IncrementalDetokenizer


class StopText:
    """The text of a growing sequence of ids, cut at the first stop string.

    Attributes:
        text: all text released.
        token_ids: all ids released; ids are held back only while a stop string may take them.
        stopped: whether a stop string was found.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: Sequence[str]) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.stopped = False
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._held = ""

    def push(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Take the next ids; return the text and the ids that are released by them."""
        self._ids += ids
        return self._release(self._detokenizer.push(ids), at_end=False)

    def finish(self, end_id: int | None) -> tuple[str, list[int]]:
        """Release the rest; `end_id`, an end-of-text id that has no text, follows it."""
        text, ids = self._release(self._detokenizer.flush(), at_end=True)
        if end_id is not None and not self.stopped:
            self.token_ids.append(end_id)
            ids.append(end_id)
        return text, ids

    def _release(self, new_text: str, at_end: bool) -> tuple[str, list[int]]:
        if self.stopped:
            return "", []
        self._held += new_text
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        self.stopped = bool(found)
        size = min(found)[1] if found else len(self._held)
        if not found and not at_end:
            size -= self._may_begin_a_stop()
        text, self._held = self._held[:size], self._held[size:]
        self.text += text
        ids = self._ids[len(self.token_ids) : self._num_released(at_end)]
        self.token_ids += ids
        return text, ids

    def _may_begin_a_stop(self) -> int:
        """Length of the longest end of the held text that some stop string begins with."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

    def _num_released(self, at_end: bool) -> int:
        """Ids whose text is released whole; all of them where no stop string can take one back."""
        if not self._stops or (at_end and not self.stopped):
            return len(self._ids)
        ends = self._detokenizer.text_ends
        count = len(self.token_ids)
        while count < len(ends) and ends[count] <= len(self.text):
            count += 1
        return count
