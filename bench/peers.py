"""Other implementations of greedy decoding that `decode.py` runs beside the engine.

Each is optional: asked for and not installed is an error, never a row left out.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import decode_modes
import torch
from peer_llama_cpp import LlamaCppPeer

from lookahead.config import ModelConfig, SamplingConfig
from lookahead.errors import InputError

LOOKED_UP_TOKENS = 10


class TransformersPeer:
    """Greedy `generate` of transformers with its key/value cache, one sequence."""

    settings: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self, path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        transformers = _import_transformers()
        try:
            # The newer name of this argument, `dtype`, is unknown to releases that we support.
            self._model = transformers.AutoModelForCausalLM.from_pretrained(path, torch_dtype=dtype)
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"transformers cannot load {path}: {reason}") from error
        self._model.to(device).eval()
        self._settings = transformers.GenerationConfig(
            do_sample=False,
            use_cache=True,
            eos_token_id=list(config.eos_token_ids) or None,
            pad_token_id=0,
        )

    @staticmethod
    def require() -> None:
        """Raise InputError where the package is missing."""
        _import_transformers()

    def run(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        trace: decode_modes.Trace | None = None,
    ) -> decode_modes.Run:
        """Decode one prompt; there is nothing to trace.

        What comes with the prefill is not counted: neither its tokens, of which greedy decoding has
        one, nor its time.
        """
        ids = torch.tensor([token_ids], device=self._model.device)
        clock = _TokenClock()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._settings,
            max_new_tokens=max_new_tokens,
            streamer=clock,
            **self.settings,
        )
        new_ids = output[0, len(token_ids) :].tolist()
        _, first, *rest = clock.counts
        seconds = clock.times[-1] - clock.times[1]
        return decode_modes.Run(new_ids, len(new_ids) - first, len(rest), seconds)


class TransformersLookUpPeer(TransformersPeer):
    """The same with candidates looked up in the prompt and the text so far."""

    settings = MappingProxyType({"prompt_lookup_num_tokens": LOOKED_UP_TOKENS})


class _TokenClock:
    """A streamer that notes when the prompt, and then each step's tokens, arrived on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        pass


def _import_transformers() -> Any:
    """transformers, with its remarks and progress bars off."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "--peers: transformers cannot be imported; run `pip install transformers` "
            "or leave the option out"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


PEERS = {
    "transformers": TransformersPeer,
    "transformers-pld": TransformersLookUpPeer,
    "llama-cpp": LlamaCppPeer,
}


def parse_peers(text: str, sampling: SamplingConfig) -> list[str]:
    """Names, separated by commas, of peers that are installed and can choose tokens like this."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in PEERS:
            raise InputError(f"--peers: {name!r} is not known, expected {', '.join(PEERS)}")
        PEERS[name].require()
    if names and sampling != SamplingConfig():
        raise InputError("--peers decode greedily: leave out --peers or the sampling options")
    return names
