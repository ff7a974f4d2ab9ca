"""The same question asked of transformers: its prompt look-up decoding against its greedy decoding."""

from pathlib import Path
from typing import Any

import peers
import torch

from lookahead.compare import first_difference
from lookahead.config import ModelConfig

LOOKED_UP_TOKENS = 10


class LookUpPeer(peers.TransformersPeer):
    """Both ways of `generate` on one model."""

    def __init__(
        self, path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(path, config, dtype, device)

    def compare(self, token_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        """As `exactness.compare_texts`, without logits."""
        plain, scores = self._generate(token_ids, max_new_tokens)
        other, _ = self._generate(
            token_ids, max_new_tokens, prompt_lookup_num_tokens=LOOKED_UP_TOKENS
        )
        place = first_difference(plain, other)
        margin = None
        if place is not None and place < len(scores):
            best = scores[place][0].float().topk(2).values
            margin = float(best[0] - best[1])
        return {
            "name": "transformers, prompt look-up",
            "peer": True,
            "tokens": len(plain),
            "identical": place is None,
            "first_difference": place,
            "margin": margin,
            "logits_compared": None,
            "logits_differ": None,
        }

    def _generate(
        self, token_ids: list[int], max_new_tokens: int, **settings: int
    ) -> tuple[list[int], tuple[torch.Tensor, ...]]:
        ids = torch.tensor([token_ids], device=self._model.device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._settings,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        return output.sequences[0, len(token_ids) :].tolist(), output.scores
