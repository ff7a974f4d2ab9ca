"""Load a checkpoint, take requests, return text: the Python interface.

Knows what can be asked for and refuses the rest. How a request runs is `stream.py`'s business, what a
step does that of `step.py`.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lookahead.compare import compared
from lookahead.config import (
    AUTOREGRESSIVE,
    MODES,
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
from lookahead.prompt_ids import Prompt, as_prompts, prompt_ids
from lookahead.results import Result
from lookahead.step import Step, StepRecord
from lookahead.stream import OnLogits, Request, Stream
from lookahead.tokenizer import Tokenizer

DEFAULT_MAX_LENGTH = 4096
MAX_STEP_ROWS = 65536  # far more than any chip computes at the price of one


class Engine:
    """A loaded model, its buffers and its tokenizer. One request runs at a time."""

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
        self._running: Callable[[], Stream | None] = lambda: None  # weak: a dropped stream is over

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
        trace: Callable[[StepRecord], None] | None = None,
    ) -> Result | list[Result]:
        """Decode one prompt to its end. Arguments as for `stream`; a list of prompts gives a list."""
        prompts, is_list = as_prompts(prompt)
        if len(prompts) > 1:
            raise InputError(
                f"got {len(prompts)} prompts, expected one: give them one at a time, batches do not "
                "exist yet"
            )
        stream = self.stream(
            prompts[0],
            max_new_tokens=max_new_tokens,
            mode=mode,
            lookahead=lookahead,
            sampling=sampling,
            stop=stop,
            ignore_eos=ignore_eos,
            trace=trace,
        )
        result = stream.run_to_end()
        return [result] if is_list else result

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
        trace: Callable[[StepRecord], None] | None = None,
        on_logits: OnLogits | None = None,
    ) -> "Stream":
        """Decode one prompt step by step.

        Args:
            prompt: text, or token ids.
            max_new_tokens: at most so many tokens are emitted.
            mode: "lookahead" or "autoregressive".
            lookahead: (W, N, G) and more; by default `default_lookahead()`.
            sampling: greedy decoding only, as yet.
            stop: the text ends before the first of these strings.
            ignore_eos: go on behind an end-of-text id.
            trace: called with each step's record.
            on_logits: called with each step's logits [count, vocab], those that its tokens are the
                choices of, on the model's device; those of a stop string's tokens too.

        Returns:
            An iterator of chunks, one a step; its `result` is ready at the end.

        Raises:
            InputError: something given cannot be used, or another stream is running.
        """
        running = self._running()
        if running is not None and not running.is_done:
            raise InputError(
                "another stream of this engine is running: read it to its end or close it first"
            )
        if mode not in MODES:
            raise InputError(f"mode {mode!r} is not known, expected {' or '.join(MODES)}")
        check_whole("max_new_tokens", max_new_tokens, least=1)
        is_list = isinstance(stop, Iterable) and not isinstance(stop, str)
        if not is_list or not all(isinstance(text, str) and text for text in stop):
            raise InputError(f"stop must be a list of non-empty strings, got {stop!r:.80}")
        sampling = SamplingConfig() if sampling is None else sampling
        config = self.default_lookahead() if lookahead is None else lookahead
        for name, value, kind in (
            ("sampling", sampling, SamplingConfig),
            ("lookahead", config, LookaheadConfig),
        ):
            if not isinstance(value, kind):
                raise InputError(f"{name} must be a {kind.__name__}, got {value!r:.80}")
        if mode == "autoregressive":
            config = AUTOREGRESSIVE
        self._check_rows(config)
        ids = prompt_ids(prompt, self.tokenizer, self.model.config, self.max_length)
        if self._step.config != config:
            self._step = Step(self.model, self._cache, self._state, config)
        request = Request(
            prompt=prompt if isinstance(prompt, str) else self.tokenizer.decode(ids),
            token_ids=ids,
            max_new_tokens=max_new_tokens,
            mode=mode,
            seed=sampling.seed,
            eos_ids=() if ignore_eos else self.model.config.eos_token_ids,
            stops=tuple(stop),
        )
        stream = Stream(self._step, self.tokenizer.detokenizer(), request, trace, on_logits)
        self._running = weakref.ref(stream)
        return stream

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
        """Decode one prompt in both modes. Arguments as for `stream`.

        Returns:
            The result of lookahead decoding; its `autoregressive` is the other mode's, `identical`
            tells whether the ids are the same, `difference` where and why not.
        """

        def start(mode: str, on_logits: OnLogits | None = None) -> Stream:
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
