"""The key/value cache: one preallocated buffer for committed tokens and the rows of a step.

Index p < max_length of a sequence holds position p once it is committed; index `max_length + r` is
scratch for row r of the step that is running. Committing copies rows, it never recomputes them. Knows
nothing of models or of how rows were accepted.
"""

import torch

from lookahead.kernels.commit_rows import commit_rows


class KVCache:
    """Keys and values of all layers.

    Attributes:
        data: [layers, 2, B, num_kv_heads, max_length + scratch rows, head_dim].
        max_length: positions that can be committed; scratch rows follow from this index on.
        longest: what no committed length is above; bounds the work of a step, see `attend`.
    """

    def __init__(
        self,
        data: torch.Tensor,
        max_length: int,
        implementation: str = "torch",
        longest: int | None = None,
    ) -> None:
        """`implementation` names that of `commit_rows`; `longest` is by default `max_length`."""
        self.data = data
        self.max_length = max_length
        self.longest = max_length if longest is None else longest
        if not 0 <= self.longest <= max_length:
            raise ValueError(f"longest: expected 0..{max_length}, got {longest}")
        self._implementation = implementation

    def sequence(self, index: int) -> "KVCache":
        """The cache of one sequence, B = 1, sharing this cache's memory."""
        one = self.data[:, :, index : index + 1]
        return KVCache(one, self.max_length, self._implementation)

    def up_to(self, longest: int) -> "KVCache":
        """This cache, sharing its memory, while no committed length is above `longest`."""
        return KVCache(self.data, self.max_length, self._implementation, longest)

    @property
    def row_start(self) -> int:
        """Index of row 0's key and value."""
        return self.max_length

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [B, num_kv_heads, max_length + scratch_rows, head_dim]."""
        return self.data[index, 0], self.data[index, 1]

    def copy(self, source: int, target: int, length: int) -> None:
        """Give one sequence the first `length` positions of another."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def commit(self, rows: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Copy the first counts[b] of rows[b] to positions lengths[b], lengths[b] + 1, ...

        Args:
            rows: [B, M] int64, row numbers of the step, in order of position.
            counts: [B] int, how many of them are accepted, 0..M.
            lengths: [B] int, committed length before this step.
        """
        commit_rows(
            self.data,
            rows,
            counts,
            lengths,
            row_start=self.row_start,
            implementation=self._implementation,
        )
