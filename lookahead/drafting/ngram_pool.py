"""The n-gram pool: for each key token up to G continuations of N-1 tokens, most recent first.

Dense tensors addressed by the key token, one pool a sequence. Inserting moves a continuation to the
front, looking up does not, and the last falls out. Everything is a fixed-shape tensor operation on the
pool's device.
"""

from copy import copy

import torch

# Where an n-gram was seen last; the pool stores the index.
ORIGINS = ("prompt", "window", "output")
PROMPT, WINDOW, OUTPUT = range(3)


class NgramPool:
    """G slots of N-1 tokens for each of `vocab_size` key tokens of each sequence.

    Attributes:
        guesses, continuation: G and N-1.
        entries: [B, vocab, G, N-1] int32, slots in order of recency.
        origins: [B, vocab, G] int8, index into ORIGINS of each entry's latest insertion.
        counts: [B, vocab] int32, filled slots.
    """

    def __init__(
        self, batch_size: int, vocab_size: int, guesses: int, ngram: int, device: torch.device
    ) -> None:
        self.guesses, self.continuation = guesses, ngram - 1
        shape = (batch_size, vocab_size, guesses)
        self.entries = torch.zeros((*shape, ngram - 1), dtype=torch.int32, device=device)
        self.origins = torch.zeros(shape, dtype=torch.int8, device=device)
        self.counts = torch.zeros((batch_size, vocab_size), dtype=torch.int32, device=device)
        self._sequence = torch.arange(batch_size, device=device).unsqueeze(1)

    def sequence(self, index: int) -> "NgramPool":
        """The pool of one sequence, B = 1, sharing this pool's memory."""
        one = copy(self)
        one.entries, one.origins, one.counts = (
            each[index : index + 1] for each in (self.entries, self.origins, self.counts)
        )
        one._sequence = self._sequence[:1]
        return one

    def clear(self, sequence: int) -> None:
        """Forget one sequence's n-grams."""
        self.counts[sequence] = 0

    def look_up(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Continuations of one key token a sequence.

        Args:
            keys: [B] int.

        Returns:
            entries [B, G, N-1] int32, origins [B, G] int8, counts [B] int32; slots from counts[b] on
            hold no meaning.
        """
        key = keys.long().unsqueeze(1)
        return (
            self.entries[self._sequence, key].squeeze(1),
            self.origins[self._sequence, key].squeeze(1),
            self.counts[self._sequence, key].squeeze(1),
        )

    def insert(
        self, keys: torch.Tensor, grams: torch.Tensor, origins: torch.Tensor, valid: torch.Tensor
    ) -> None:
        """Insert M n-grams a sequence, as if one after the other in order of M.

        The slots of a key after all insertions are the distinct continuations in order of their last
        insertion, newest first, then the older entries: this is computed at once for the key of each
        item. Items with equal keys compute, and write, equal slots.

        Args:
            keys: [B, M] int, within the vocabulary, invalid items too.
            grams: [B, M, N-1] int.
            origins: [M] or [B, M] int, index into ORIGINS.
            valid: [B, M] bool; an item that is not valid is not inserted.
        """
        guesses = self.guesses
        if guesses == 0 or keys.shape[1] == 0:
            return
        key, newest_first = keys.long(), torch.arange(keys.shape[1] - 1, -1, -1, device=keys.device)
        grams = grams.to(torch.int32)
        old = self.entries[self._sequence, key]  # [B, M, G, N-1]
        old_origins = self.origins[self._sequence, key]
        old_count = self.counts[self._sequence, key]

        # replaced[b, i, j]: item j is valid and leaves the same n-gram as item i.
        same_gram = (grams.unsqueeze(2) == grams.unsqueeze(1)).all(-1)
        same_key = key.unsqueeze(2) == key.unsqueeze(1)
        usable = same_key & valid.unsqueeze(1)
        later = newest_first.unsqueeze(1) > newest_first.unsqueeze(0)
        superseded = (usable & same_gram & later).any(2)

        # For the key of item i: the new items j that stay, newest first, then the old slots that stay.
        new_stays = (usable & ~superseded.unsqueeze(1))[:, :, newest_first]
        matches_old = (old.unsqueeze(2) == grams.unsqueeze(1).unsqueeze(3)).all(-1)  # [B, M, M, G]
        slots = torch.arange(guesses, device=keys.device)
        old_stays = slots < old_count.unsqueeze(2)
        old_stays = old_stays & ~(matches_old & usable.unsqueeze(3)).any(2)
        stays = torch.cat([new_stays, old_stays], dim=2)  # [B, M, M + G]
        rank = stays.cumsum(2) - 1
        # Slot G takes whatever does not stay or falls out; it is dropped below.
        slot = torch.where(stays & (rank < guesses), rank, guesses)

        new_grams = grams[:, newest_first].unsqueeze(1).expand(-1, key.shape[1], -1, -1)
        merged = _place(torch.cat([new_grams, old], dim=2), slot, guesses)
        new_origins = origins.to(torch.int8).expand(key.shape)[:, newest_first]
        new_origins = new_origins.unsqueeze(1).expand(-1, key.shape[1], -1)
        merged_origins = _place(torch.cat([new_origins, old_origins], dim=2), slot, guesses)
        self.entries[self._sequence, key] = merged
        self.origins[self._sequence, key] = merged_origins
        self.counts[self._sequence, key] = stays.sum(2).clamp_(max=guesses).to(torch.int32)


def _place(values: torch.Tensor, slot: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Move values[b, m, i, ...] to [b, m, slot[b, m, i], ...]; slot `num_slots` is thrown away."""
    placed = values.new_zeros((*values.shape[:2], num_slots + 1, *values.shape[3:]))
    index = slot.view(*slot.shape, *[1] * (values.dim() - 3)).expand_as(values)
    return placed.scatter_(2, index, values)[:, :, :num_slots]
