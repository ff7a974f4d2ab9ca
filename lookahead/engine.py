"""Load a checkpoint, take requests, return text: the Python interface.

Knows who may use the sequences that there are, one batch at a time. What can be asked for is
`request.py`'s business, how requests run `batch.py`'s, which step they run `step_source.py`'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead.answer import Answer, Kept
from lookahead.batch import Batch, OnLogits, Trace
from lookahead.compare import compared
from lookahead.config import (
    AUTOREGRESSIVE,
    DEFAULT_STEP_ROWS,
    MAX_STEP_ROWS,
    LookaheadConfig,
    SamplingConfig,
    check_whole,
)
from lookahead.conversation import Conversation
from lookahead.devices import dtype_name, refuse_out_of_memory
from lookahead.errors import InputError
from lookahead.load import Where, load_model, read_checkpoint
from lookahead.models.llama import Llama
from lookahead.prompt_ids import NO_LISTS, Prompt, as_prompts
from lookahead.request import Wishes, check_rows, fitting_size
from lookahead.request_options import BatchOptions, DecodingOptions, RequestOptions
from lookahead.results import Result
from lookahead.row_budget import RowBudget
from lookahead.sampling import LogitsProcessor
from lookahead.session import Session
from lookahead.step_costs import StepCosts, step_costs
from lookahead.step_graph import Recorder
from lookahead.step_source import StepSource, spare_rows
from lookahead.stream import OnLogits as StreamLogits
from lookahead.stream import Stream, numbered
from lookahead.tokenizer import Tokenizer
from lookahead.tune import Tuning, tune

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Engine:
    """A loaded model, its buffers and its tokenizer. One stream or batch runs at a time."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_size: int = 1,
        max_step_rows: int = DEFAULT_STEP_ROWS,
        costs: StepCosts | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`costs` are what steps of this model take; if not given, measured when first needed.
        `recorder` records steps and fetches their outcome; by default there is one where steps can be
        recorded, which is on a GPU with Triton's operations."""
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.max_step_rows = max_step_rows
        self._steps = StepSource(model, max_length, batch_size, max_step_rows, recorder)
        self.costs = costs
        self._running: Callable[[], Batch | None] = lambda: None  # weak: a dropped one is over

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "auto",
        dtype: str = "auto",
        max_length: int | None = None,
        batch_size: int = 1,
        max_step_rows: int = DEFAULT_STEP_ROWS,
        implementation: str = "auto",
        exact: bool = True,
    ) -> Engine:
        """Load a checkpoint directory and allocate every buffer.

        Args:
            path: directory with config.json, safetensors weights and a tokenizer.
            device: "auto", "cpu", "cuda" or "cuda:INDEX".
            dtype: "auto", "bfloat16", "float16", "float32" or "float64".
            max_length: tokens of prompt and answer together; by default 4096 or, if that is less,
                what the model was made for.
            batch_size: sequences per step.
            max_step_rows: rows that a sequence may have in a step; bounds (W, N, G).
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
        where = Where.choose(str(device), str(dtype), implementation)
        config, tokenizer, max_length = read_checkpoint(path, max_length)
        what = f"{path} as {dtype_name(where.dtype)} with max_length {max_length}"
        with refuse_out_of_memory(what, where.device):
            num_positions = max_length + spare_rows(max_step_rows)
            engine = cls(
                load_model(path, config, where, num_positions, exact),
                tokenizer,
                max_length=max_length,
                batch_size=batch_size,
                max_step_rows=max_step_rows,
            )
        engine._steps.warm_up()
        return engine

    @property
    def tuning(self) -> Tuning:
        """`tuning_for` as many prompts as run at a time, or more."""
        return self.tuning_for(self._steps.batch_size)

    def tuning_for(self, num_prompts: int) -> Tuning:
        """The (W, N, G) that is expected to be fastest on this machine for a batch of so many prompts,
        and why; the first time on a machine it is measured, for a few seconds."""
        if self.costs is None:
            self.costs = step_costs(self.model, self.max_length, self.max_step_rows)
        # A step of fixed shape has rows for every sequence, whether there is a prompt for it or not.
        num_running = self._steps.batch_size
        if not self._steps.step.fixed_shape:
            num_running = min(num_running, max(1, num_prompts))
        on_cpu = self.model.device.type == "cpu"
        return tune(self.costs, self.max_step_rows, num_running, on_cpu)

    @property
    def capture_seconds(self) -> float:
        """How long it took to record the step that runs now; 0.0 where none is recorded."""
        pipeline = self._steps.pipeline
        return 0.0 if pipeline is None else pipeline.capture_seconds

    def _new_budget(self) -> RowBudget:
        most, costs = self.max_step_rows * self._steps.batch_size, self.tuning.costs
        seconds = [costs.at(rows) for rows in range(most + 1)]
        return RowBudget(
            self._steps.step.config, seconds, sees_candidates=not self._steps.step.fixed_shape
        )

    def default_lookahead(self) -> LookaheadConfig:
        """A (W, N, G) to begin with where one is chosen by hand, by device and the rows that there
        are."""
        if self.model.device.type == "cpu":
            # A CPU pays for every row beyond the few whose arithmetic hides behind the weights' way.
            window, ngram, guesses = 4, 3, 2
        else:
            window, ngram, guesses = 15, 5, 15
        most = fitting_size(ngram, self.max_step_rows)
        return LookaheadConfig(min(window, most), ngram, min(guesses, most))

    def generate(
        self, prompt: Prompt | Sequence[Prompt], **options: Unpack[BatchOptions]
    ) -> Result | list[Result]:
        """Decode one prompt, or a list of prompts, to the end. Options as for `batch`.

        Returns:
            The result; for a list of prompts, or more than one sample, the results in order.
        """
        prompts, is_list = as_prompts(prompt)
        results = self.batch(prompts, **options).run_to_end()
        return results if is_list or options.get("num_samples", 1) > 1 else results[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        on_logits: StreamLogits | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Decode one prompt step by step. Options as for `batch`, but that there is one answer and
        that `on_logits` is given no number.

        Returns:
            An iterator of chunks, one a step; its `result` is ready at the end.
        """
        num_samples = options.get("num_samples", 1)  # `batch` would take more than one
        if num_samples != 1:
            raise InputError(
                f"a stream is of one answer, got {num_samples}: use `batch` for several"
            )
        return Stream(self.batch([prompt], on_logits=numbered(on_logits), **options))

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
        num_samples: int = 1,
        logprobs: int | None = None,
        logits_processor: LogitsProcessor | None = None,
    ) -> Batch:
        """Decode prompts step by step, `batch_size` at a time: when one ends, the next begins.

        Args:
            prompts: each text, or token ids.
            max_new_tokens: at most so many tokens are emitted for each.
            mode: "lookahead" or "autoregressive".
            lookahead: (W, N, G) and more; by default that of `tuning_for` so many prompts.
            sampling: how a token is chosen; by default greedily.
            stop: a text ends before the first of these strings.
            ignore_eos: go on behind an end-of-text id.
            trace: called with each step's record of each prompt.
            on_logits: called with a prompt's number and the logits [count, vocab] that its tokens of a
                step are the choices of, before any warper, on the model's device; those of a stop
                string's tokens too.
            num_samples: answers to each prompt; they count as prompts, those to one side by side.
            logprobs: tell log-probabilities of new tokens, and of so many of the most probable ones.
            logits_processor: is given logits [n, vocab] and n histories, of each the ids before the
                next token, and returns logits of the same kind, to which the warpers then apply. It
                must depend on each row alone; see docs/sampling.md.

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
            num_samples=num_samples,
            logprobs=logprobs,
        )
        for name, given, expected in (
            ("logits_processor", logits_processor, "take logits and histories and return logits"),
            ("trace", trace, "be a callable that takes a step's record"),
            ("on_logits", on_logits, "be a callable that takes logits"),
        ):
            if given is not None and not callable(given):
                raise InputError(f"{name} must {expected}, got {given!r:.80}")
        if not isinstance(lookahead, LookaheadConfig | None):
            raise InputError(f"lookahead must be a LookaheadConfig, got {lookahead!r:.80}")
        if isinstance(prompts, NO_LISTS) or not isinstance(prompts, Iterable):
            raise InputError(f"prompts must be a list of prompts, got {prompts!r:.80}")
        requests = wishes.requests(
            list(prompts), self.tokenizer, self.model.config, self.max_length
        )
        if mode == "autoregressive":
            config = AUTOREGRESSIVE
        else:
            config = self.tuning_for(len(requests)).config if lookahead is None else lookahead
        self.check_rows(config)
        keep_logits = on_logits is not None or logprobs is not None
        steps = self._steps.runner(
            config, wishes.sampling, logits_processor, trace is not None, keep_logits
        )
        answers = [
            Answer(request, self.tokenizer.detokenizer(), self.max_length) for request in requests
        ]
        choice = "given"
        if config.adaptive:
            tuning = self.tuning_for(len(requests))
            choice = tuning.reason if _shape(config) == _shape(tuning.config) else choice
        batch = Batch(
            steps,
            answers,
            choice=choice,
            budget=self._new_budget() if config.adaptive else None,
            trace=trace,
            on_logits=on_logits,
        )
        self._running = weakref.ref(batch)
        return batch

    def session(
        self, prompt: Prompt, *, mode: str = "lookahead", **options: Unpack[DecodingOptions]
    ) -> Session:
        """Decode one prompt for sampling code of your own. Options as for `batch`.

        Returns:
            An iterator of steps, each with its record and logits; the next one runs when it is asked
            for.
        """

        def start(trace: Trace, on_logits: StreamLogits) -> Stream:
            return self.stream(prompt, mode=mode, trace=trace, on_logits=on_logits, **options)

        return Session(start)

    def compare(self, prompt: Prompt, **options: Unpack[DecodingOptions]) -> Result:
        """Decode one prompt in both modes. Options as for `batch`.

        Returns:
            The result of lookahead decoding; its `autoregressive` is the other mode's, `identical`
            tells whether the ids are the same, `difference` where and why not.
        """

        # Ids may come one by one, and are read twice.
        prompts, is_list = as_prompts(prompt)
        given: Any = prompts if is_list else prompts[0]

        def start(mode: str, on_logits: StreamLogits | None = None) -> Stream:
            return self.stream(given, mode=mode, on_logits=on_logits, **options)

        result = start("lookahead").run_to_end()
        return compared(result, start("autoregressive").run_to_end(), start)

    def conversation(self, system: str | None = None) -> Conversation:
        """A conversation whose turns leave their text in the cache for the next one, behind a system
        message if given. Raises InputError where the checkpoint has no chat template."""
        return Conversation(self.tokenizer, self._start_turn, self.max_length, system)

    def _start_turn(
        self,
        token_ids: list[int],
        before: Stream | None,
        *,
        on_logits: StreamLogits | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """See `conversation.StartTurn`."""
        ran_last = self._running()
        stream = self.stream(token_ids, on_logits=on_logits, **options)
        # Whatever ran in between has written over the cache.
        if before is not None and before.batch is ran_last:
            in_cache = _num_common(token_ids[:-1], before.answer.committed_ids)
            is_same_pool = before.batch.step is stream.batch.step
            kept = before.answer.kept
            in_pool = in_cache if before.answer.is_prefilled else min(in_cache, kept.in_pool)
            stream.answer.kept = Kept(in_cache, in_pool if is_same_pool else 0)
        return stream

    def chat_ids(self, message: str, system: str | None = None) -> list[int]:
        """Token ids of one user message, behind a system message if given, in the checkpoint's chat
        format. Raises InputError where the checkpoint has no chat template."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        return self.tokenizer.chat_ids([*messages, {"role": "user", "content": message}])

    def check_rows(self, config: LookaheadConfig) -> None:
        """Raise InputError for a (W, N, G) that takes more rows than a step may have here."""
        check_rows(config, self.max_step_rows)


def _shape(config: LookaheadConfig) -> tuple[int, int, int]:
    return config.window, config.ngram, config.guesses


def _num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first ids are the same."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ids), len(others)))
