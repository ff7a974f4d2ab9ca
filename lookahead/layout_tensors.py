"""A lookahead layout's numbers as tensors, where a step needs them on its device."""

import torch

from lookahead.layout import LookaheadLayout


class LayoutTensors:
    """K is the number of rows with logits, P of candidates (at least one path), D of a path's rows.

    Attributes:
        layout: what these are the numbers of.
        depths: [T] int32, depth of each row.
        parents: [T] int64, parent of each row, -1 for row 0.
        logit_rows: [K] int64, rows with logits.
        logit_places: [T] int64, each row's place among those; 0 for the others.
        paths: [P, D] int64, rows of each candidate's path from row 0.
        last_level_places: [W] int64, places of the rows whose next tokens complete n-grams.
    """

    def __init__(self, layout: LookaheadLayout, device: torch.device) -> None:
        self.layout = layout
        self.depths = torch.tensor(layout.depths, dtype=torch.int32, device=device)
        self.parents = torch.tensor(layout.parents, dtype=torch.int64, device=device)
        self.logit_rows = torch.tensor(layout.logit_rows, device=device)
        self.paths = torch.tensor(layout.candidate_paths, device=device)
        self.logit_places = torch.zeros(layout.num_rows, dtype=torch.int64, device=device)
        self.logit_places[self.logit_rows] = torch.arange(len(layout.logit_rows), device=device)
        last_level = torch.tensor(layout.last_level_rows, dtype=torch.int64, device=device)
        self.last_level_places = self.logit_places[last_level]
