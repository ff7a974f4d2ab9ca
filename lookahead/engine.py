"""Load a checkpoint, take requests, return text: the Python interface.

Knows which buffers there are and who may use them. What can be asked for is `request.py`'s business,
how requests run `batch.py`'s, what a step does `step.py`'s.
"""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from lookahead.answer import Answer
from lookahead.batch import Batch, OnLogits, Trace
from lookahead.compare import compared
from lookahead.config import (
    AUTOREGRESSIVE,
    LookaheadConfig,
    SamplingConfig,
    check_whole,
)
from lookahead.decode_state import DecodeState
from lookahead.devices import (
    choose_device,
    choose_dtype,
    choose_implementation,
    dtype_name,
    refuse_out_of_memory,
)
from lookahead.errors import InputError
from lookahead.kernels.checks import check_can_run
from lookahead.layout import LookaheadLayout
from lookahead.models.checkpoint_config import read_model_config
from lookahead.models.llama import Llama
from lookahead.models.loader import load_weights
from lookahead.prefill import CHUNK_ROWS
from lookahead.prompt_ids import Prompt, as_prompts
from lookahead.request import Wishes
from lookahead.results import Result
from lookahead.step import Step
from lookahead.stream import OnLogits as StreamLogits
from lookahead.stream import Stream, numbered
from lookahead.tokenizer import Tokenizer

DEFAULT_MAX_LENGTH = 4096
MAX_STEP_ROWS = 65536  # far more than any chip computes at the price of one


class Engine:
    """A loaded model, its buffers and its tokenizer. One stream or batch runs at a time."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_size: int = 1,
        max_step_rows: int = 128,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.max_step_rows = max_step_rows
        spare = _spare_rows(max_step_rows)
        self._cache = model.new_cache(batch_size, max_length, spare)
        num_eos_ids = len(model.config.eos_token_ids)
        self._state = DecodeState(batch_size, max_length, spare, num_eos_ids, model.device)
        self._step = Step(model, self._cache, self._state, AUTOREGRESSIVE)
        self._running: Callable[[], Batch | None] = lambda: None  # weak: a dropped one is over

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        max_length: int | None = None,
        batch_size: int = 1,
        max_step_rows: int = 128,
        implementation: str = "auto",
        exact: bool = True,
    ) -> "Engine":
        """Load a checkpoint directory and allocate every buffer.

        Args:
            path: directory with config.json, safetensors weights and a tokenizer.
            device: "auto", "cpu", "cuda" or "cuda:INDEX".
            dtype: "auto", "bfloat16", "float16", "float32" or "float64".
            max_length: tokens of prompt and answer together; by default 4096 or, if that is less,
                what the model was made for.
            batch_size: sequences per step.
            max_step_rows: rows that a step may have; bounds (W, N, G).
            implementation: "torch", "triton" or "numba", of the operations in `kernels/`; "auto" is
                Triton's on a GPU and Numba's on a CPU. On a CPU Triton's run only in its interpreter,
                slowly, to check them; torch's are the specification.
            exact: keep every mode's text the same, bit for bit; results tell whether it could be done.
                Without it a GPU's products are the fastest that there are.

        Raises:
            InputError: one line saying what was wrong, what was expected and what to do.
        """
        path = Path(path)
        check_whole("batch_size", batch_size, least=1)
        check_whole("max_step_rows", max_step_rows, least=2, most=MAX_STEP_ROWS)
        chosen_device = choose_device(str(device))
        chosen_dtype = choose_dtype(str(dtype), chosen_device)
        implementation = choose_implementation(implementation, chosen_device, chosen_dtype)
        try:
            check_can_run(implementation, chosen_device, chosen_dtype)
        except ValueError as error:
            raise InputError(str(error)) from error
        config = read_model_config(path)
        limit = config.max_position_embeddings
        if max_length is None:
            max_length = min(DEFAULT_MAX_LENGTH, limit)
        check_whole("max_length", max_length, least=2)
        if max_length > limit:
            raise InputError(
                f"max_length {max_length} is more than the {limit} positions of the model"
            )
        tokenizer = Tokenizer.load(path)
        if tokenizer.vocab_size > config.vocab_size:
            raise InputError(
                f"{path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, expected fewer than "
                f"the vocab_size {config.vocab_size} of config.json"
            )
        what = f"{path} as {dtype_name(chosen_dtype)} with max_length {max_length}"
        with refuse_out_of_memory(what, chosen_device):
            num_positions = max_length + _spare_rows(max_step_rows)
            model = Llama(
                config,
                load_weights(path, config, chosen_dtype, chosen_device),
                num_positions,
                implementation,
                exact,
            )
            return cls(
                model,
                tokenizer,
                max_length=max_length,
                batch_size=batch_size,
                max_step_rows=max_step_rows,
            )

    def default_lookahead(self) -> LookaheadConfig:
        """The (W, N, G) used where none is given, by device and the rows that there are."""
        if self.model.device.type == "cpu":
            # A CPU pays for every row beyond the few whose arithmetic hides behind the weights' way.
            window, ngram, guesses = 4, 3, 2
        else:
            window, ngram, guesses = 15, 5, 15
        most = self._fitting_size(ngram)
        return LookaheadConfig(min(window, most), ngram, min(guesses, most))

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        mode: str = "lookahead",
        lookahead: LookaheadConfig | None = None,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        trace: Trace | None = None,
    ) -> Result | list[Result]:
        """Decode one prompt, or a list of prompts, to the end. Arguments as for `batch`.

        Returns:
            The result; for a list the results in its order.
        """
        prompts, is_list = as_prompts(prompt)
        batch = self.batch(
            prompts,
            max_new_tokens=max_new_tokens,
            mode=mode,
            lookahead=lookahead,
            sampling=sampling,
            stop=stop,
            ignore_eos=ignore_eos,
            trace=trace,
        )
        results = batch.run_to_end()
        return results if is_list else results[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        mode: str = "lookahead",
        lookahead: LookaheadConfig | None = None,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        trace: Trace | None = None,
        on_logits: StreamLogits | None = None,
    ) -> Stream:
        """Decode one prompt step by step. Arguments as for `batch`, but that `on_logits` is given no
        number.

        Returns:
            An iterator of chunks, one a step; its `result` is ready at the end.
        """
        return Stream(
            self.batch(
                [prompt],
                max_new_tokens=max_new_tokens,
                mode=mode,
                lookahead=lookahead,
                sampling=sampling,
                stop=stop,
                ignore_eos=ignore_eos,
                trace=trace,
                on_logits=numbered(on_logits),
            )
        )

    def batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        mode: str = "lookahead",
        lookahead: LookaheadConfig | None = None,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        trace: Trace | None = None,
        on_logits: OnLogits | None = None,
    ) -> Batch:
        """Decode prompts step by step, `batch_size` at a time: when one ends, the next begins.

        Args:
            prompts: each text, or token ids.
            max_new_tokens: at most so many tokens are emitted for each.
            mode: "lookahead" or "autoregressive".
            lookahead: (W, N, G) and more; by default `default_lookahead()`.
            sampling: greedy decoding only, as yet.
            stop: a text ends before the first of these strings.
            ignore_eos: go on behind an end-of-text id.
            trace: called with each step's record of each prompt.
            on_logits: called with a prompt's number and the logits [count, vocab] that its tokens of a
                step are the choices of, on the model's device; those of a stop string's tokens too.

        Returns:
            An iterator of (number of the prompt, chunk); its `results` are ready at the end.

        Raises:
            InputError: something given cannot be used, or another stream or batch is running.
        """
        running = self._running()
        if running is not None and not running.is_done:
            raise InputError(
                "another stream of this engine is running: read it to its end or close it first"
            )
        wishes = Wishes(
            max_new_tokens=max_new_tokens,
            mode=mode,
            sampling=SamplingConfig() if sampling is None else sampling,
            stop=stop,
            ignore_eos=ignore_eos,
        )
        config = self.default_lookahead() if lookahead is None else lookahead
        if not isinstance(config, LookaheadConfig):
            raise InputError(f"lookahead must be a LookaheadConfig, got {config!r:.80}")
        if mode == "autoregressive":
            config = AUTOREGRESSIVE
        self._check_rows(config)
        requests = wishes.requests(prompts, self.tokenizer, self.model.config, self.max_length)
        if self._step.config != config:
            self._step = Step(self.model, self._cache, self._state, config)
        answers = [
            Answer(request, self.tokenizer.detokenizer(), self.max_length) for request in requests
        ]
        batch = Batch(self._step, answers, trace, on_logits)
        self._running = weakref.ref(batch)
        return batch

    def compare(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        lookahead: LookaheadConfig | None = None,
        sampling: SamplingConfig | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Result:
        """Decode one prompt in both modes. Arguments as for `batch`.

        Returns:
            The result of lookahead decoding; its `autoregressive` is the other mode's, `identical`
            tells whether the ids are the same, `difference` where and why not.
        """

        def start(mode: str, on_logits: StreamLogits | None = None) -> Stream:
            return self.stream(
                prompt,
                max_new_tokens=max_new_tokens,
                mode=mode,
                lookahead=lookahead,
                sampling=sampling,
                stop=stop,
                ignore_eos=ignore_eos,
                on_logits=on_logits,
            )

        result = start("lookahead").run_to_end()
        return compared(result, start("autoregressive").run_to_end(), start)

    def chat_ids(self, message: str, system: str | None = None) -> list[int]:
        """Token ids of one user message, behind a system message if given, in the checkpoint's chat
        format. Raises InputError where the checkpoint has no chat template."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        return self.tokenizer.chat_ids([*messages, {"role": "user", "content": message}])

    def _check_rows(self, config: LookaheadConfig) -> None:
        shape = (config.window, config.ngram, config.guesses)
        num_rows = LookaheadLayout.count_rows(*shape)
        if num_rows > self.max_step_rows:
            ngram = min(config.ngram, self.max_step_rows // 2 + 1)
            size = self._fitting_size(ngram)
            raise InputError(
                f"(window, ngram, guesses) = {shape} takes {num_rows} rows a step, more than "
                f"max_step_rows {self.max_step_rows}; {(size, ngram, size)} fits"
            )

    def _fitting_size(self, ngram: int) -> int:
        """The largest window = guesses that fits with this ngram."""
        return self.max_step_rows // (2 * (ngram - 1))


def _spare_rows(max_step_rows: int) -> int:
    """Room behind the context for the rows of a step or a prefill chunk."""
    return max(max_step_rows, CHUNK_ROWS)
