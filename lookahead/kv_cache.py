"""The key/value cache: one preallocated buffer for committed tokens and the rows of a step.

Index p < max_length of a sequence holds position p once it is committed; index `max_length + r` is
scratch for row r of the step that is running. Committing copies rows, it never recomputes them. Knows
nothing of models or of how rows were accepted.
"""

import torch


class KVCache:
    """Keys and values of all layers.

    Attributes:
        data: [layers, 2, B, num_kv_heads, max_length + scratch rows, head_dim].
        max_length: positions that can be committed; scratch rows follow from this index on.
    """

    def __init__(self, data: torch.Tensor, max_length: int) -> None:
        self.data = data
        self.max_length = max_length

    def sequence(self, index: int) -> "KVCache":
        """The cache of one sequence, B = 1, sharing this cache's memory."""
        return KVCache(self.data[:, :, index : index + 1], self.max_length)

    @property
    def row_start(self) -> int:
        """Index of row 0's key and value."""
        return self.max_length

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [B, num_kv_heads, max_length + scratch_rows, head_dim]."""
        return self.data[index, 0], self.data[index, 1]

    def commit(self, rows: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Copy the first counts[b] of rows[b] to positions lengths[b], lengths[b] + 1, ...

        Args:
            rows: [B, M] int64, row numbers of the step, in order of position.
            counts: [B] int, how many of them are accepted, 0..M.
            lengths: [B] int, committed length before this step.
        """
        source = rows + self.row_start
        offsets = torch.arange(rows.shape[1], device=rows.device)
        position = lengths.unsqueeze(1) + offsets
        # A row that is not accepted is copied onto itself: the shape does not depend on the counts.
        target = torch.where(offsets < counts.unsqueeze(1), position, source)
        batch = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
        self.data[:, :, batch, :, target] = self.data[:, :, batch, :, source]
