"""llama.cpp's greedy decoding on a CPU, on the same weights in the same dtype.

Knows the interface of the package llama-cpp-python. Ids go in and out; llama.cpp's tokenizer is
not used. In 16 bits the key/value cache and attention are llama.cpp's defaults, float16 and its flash
attention. That rounds to float16 whatever it is given, so float32 goes without it, and with a float32
cache.
"""

import ctypes
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import decode_modes
import numpy as np
import torch
from checkpoint_gguf import write_gguf

from lookahead.config import ModelConfig
from lookahead.errors import InputError

POSITIONS_AT_ONCE = 512  # tokens of a prompt that one call takes


class LlamaCppPeer:
    """One token a step, its largest logit."""

    def __init__(
        self, path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model: Any = None
        self._llama_cpp = import_llama_cpp()
        if device.type != "cpu":
            raise InputError(f"--peers: llama-cpp runs on a CPU only here, not on {device}")
        self._config = config
        self._is_float32 = dtype == torch.float32
        self._context: Any = None
        self._positions = 0
        settings = self._llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "model.gguf"
            write_gguf(path, config, dtype, file)
            # A mapped file stays there for as long as it is mapped, also without a name.
            self._model = self._llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        if not self._model:
            raise InputError(f"--peers: llama-cpp cannot load the weights of {path} as GGUF")

    @staticmethod
    def require() -> None:
        """Raise InputError where the package is missing."""
        import_llama_cpp()

    def run(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        trace: decode_modes.Trace | None = None,
    ) -> decode_modes.Run:
        """Decode one prompt; there is nothing to trace. The first token comes with the prefill, which
        is not counted."""
        self._begin(len(token_ids) + max_new_tokens)
        for start in range(0, len(token_ids), POSITIONS_AT_ONCE):
            self._decode(token_ids[start : start + POSITIONS_AT_ONCE])
        new_ids = [self._choice()]
        began = time.perf_counter()
        while len(new_ids) < max_new_tokens and new_ids[-1] not in self._config.eos_token_ids:
            self._decode(new_ids[-1:])
            new_ids.append(self._choice())
        seconds = time.perf_counter() - began
        return decode_modes.Run(new_ids, len(new_ids) - 1, len(new_ids) - 1, seconds)

    def _begin(self, positions: int) -> None:
        """An empty cache for so many positions."""
        llama_cpp, threads = self._llama_cpp, torch.get_num_threads()
        if positions > self._positions:
            self._free_context()
            settings = llama_cpp.llama_context_default_params()
            settings.n_ctx = positions
            settings.n_batch = settings.n_ubatch = POSITIONS_AT_ONCE
            if self._is_float32:
                settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
                settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            self._context = llama_cpp.llama_init_from_model(self._model, settings)
            if not self._context:
                raise InputError(f"--peers: llama-cpp has no room for {positions} positions")
            self._positions = positions
        llama_cpp.llama_set_n_threads(self._context, threads, threads)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def _decode(self, ids: list[int]) -> None:
        """Run these ids at the next positions; logits are those of the last."""
        tokens = (self._llama_cpp.llama_token * len(ids))(*ids)
        batch = self._llama_cpp.llama_batch_get_one(tokens, len(ids))
        code = self._llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama.cpp's llama_decode ended with {code}")

    def _choice(self) -> int:
        """The id of the largest logit, the lowest on a tie."""
        logits = self._llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._config.vocab_size,)).argmax())

    def _free_context(self) -> None:
        if self._context:
            self._llama_cpp.llama_free(self._context)
        self._context = None

    def __del__(self) -> None:
        if self._model:
            self._free_context()
            self._llama_cpp.llama_model_free(self._model)


@cache
def import_llama_cpp() -> Any:
    """The package, with llama.cpp's log off."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError(
            "--peers: llama_cpp cannot be imported; run `pip install llama-cpp-python` "
            "or leave the option out"
        ) from error
    llama_cpp.llama_log_set(_ignore(llama_cpp), ctypes.c_void_p())
    return llama_cpp


@cache
def _ignore(llama_cpp: Any) -> Any:
    """A function for llama.cpp to call, which must stay for as long as the library does."""
    return llama_cpp.llama_log_callback(lambda level, text, data: None)
