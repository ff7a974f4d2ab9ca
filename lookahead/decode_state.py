"""Where each sequence of a batch stands: its text, how far it is committed, and where it ends."""

import torch

# No token: fills up lists of ids.
NO_ID = -1


class DecodeState:
    """The text of each sequence and how far it is.

    Attributes:
        tokens: [B, max_length + spare] int32, prompt and emitted; what follows the text is undefined.
        lengths: [B] int32, committed length L; the current token stands at index L.
        limits: [B] int32, text length (prompt and new tokens) at which decoding ends.
        finished: [B] bool.
        eos_ids: [B, num_eos_ids] int64, ids that end a text, filled up with NO_ID.
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        spare: int,
        num_eos_ids: int,
        device: torch.device,
    ) -> None:
        self.tokens = torch.zeros(
            (batch_size, max_length + spare), dtype=torch.int32, device=device
        )
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.limits = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.finished = torch.ones(batch_size, dtype=torch.bool, device=device)
        self.eos_ids = torch.full(
            (batch_size, num_eos_ids), NO_ID, dtype=torch.int64, device=device
        )

    @property
    def current(self) -> torch.Tensor:
        """[B] int32, the current token of each sequence."""
        return self.tokens.gather(1, self.lengths.long().unsqueeze(1)).squeeze(1)

    def start(
        self, sequence: int, prompt: torch.Tensor, limit: int, eos_ids: tuple[int, ...]
    ) -> None:
        """Begin a request whose prompt ([P] int) is, or will be, committed up to its last token."""
        self.tokens[sequence, : prompt.shape[0]] = prompt
        self.lengths[sequence] = prompt.shape[0] - 1
        self.limits[sequence] = limit
        self.finished[sequence] = False
        room = self.eos_ids.shape[1]
        filled_up = [*eos_ids, *[NO_ID] * (room - len(eos_ids))]
        self.eos_ids[sequence] = torch.tensor(filled_up, dtype=torch.int64, device=prompt.device)

    def end(self) -> None:
        """End all requests; their sequences are as before the first one."""
        self.finished.fill_(True)
        self.lengths.zero_()
