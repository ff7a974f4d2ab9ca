"""The same question asked of transformers: its prompt look-up decoding against its greedy decoding."""

from typing import Any

import peers
import torch
from exactness_texts import Text, compare_texts


class LookUpPeer(peers.TransformersPeer):
    """Both ways of `generate` on one model."""

    def compare(self, token_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        """As `compare_texts`."""
        plain = self._generate(token_ids, max_new_tokens)
        look_up = peers.TransformersLookUpPeer.settings
        other = self._generate(token_ids, max_new_tokens, **look_up)
        compared = compare_texts(plain, other)
        return {"name": "transformers, prompt look-up", "is_promised": False, **compared}

    def _generate(self, token_ids: list[int], max_new_tokens: int, **settings: int) -> Text:
        ids = torch.tensor([token_ids], device=self._model.device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._settings,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
        new_ids = output.sequences[0, len(token_ids) :].tolist()
        return Text(new_ids, torch.cat(output.logits)[: len(new_ids)])
