"""The buffers of an engine's sequences, and the one step that runs over them at a time.

Knows when a step has to be made anew or recorded anew. Knows nothing of requests.
"""

import torch

from lookahead.config import AUTOREGRESSIVE, LookaheadConfig, SamplingConfig
from lookahead.decode_state import DecodeState
from lookahead.models.llama import Llama
from lookahead.prefill import CHUNK_ROWS, prefill
from lookahead.row_budget import RowBudget
from lookahead.sampling import LogitsProcessor
from lookahead.step import Step
from lookahead.step_graph import PipelinedStep, Recorder
from lookahead.step_runner import EagerStep, StepRunner


def spare_rows(max_step_rows: int) -> int:
    """Room behind the context for the rows of a step or a prefill chunk."""
    return max(max_step_rows, CHUNK_ROWS)


class StepSource:
    """Makes steps for one (W, N, G) after the other.

    Attributes:
        batch_size: sequences that there are.
        kv_cache, state: of all of them.
        is_recorded: whether steps are recorded, and of fixed shape for that.
        step: the one that was asked for last.
        pipeline: of this step, once it was recorded.
    """

    def __init__(
        self,
        model: Llama,
        max_length: int,
        batch_size: int,
        max_step_rows: int,
        recorder: Recorder | None,
    ) -> None:
        """`recorder`: see `Engine`."""
        spare = spare_rows(max_step_rows)
        num_eos_ids = len(model.config.eos_token_ids)
        self._model = model
        self._recorder = recorder
        self.batch_size = batch_size
        self.kv_cache = model.new_cache(batch_size, max_length, spare)
        self.state = DecodeState(batch_size, max_length, spare, num_eos_ids, model.device)
        can_record = model.device.type == "cuda" and model.implementation == "triton"
        self.is_recorded = can_record or recorder is not None
        self.step = self._new_step(AUTOREGRESSIVE)
        self.pipeline: PipelinedStep | None = None

    def warm_up(self) -> None:
        """Run steps, so that what is compiled on a CPU is so before the first request is timed."""
        if self._model.implementation != "numba":
            return
        config = LookaheadConfig(0, 2, 1, adaptive=True)
        step, prompt = self._new_step(config), [0]
        prefill(self._model, self.kv_cache.sequence(0), torch.tensor(prompt))
        for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0)):
            step.sampler.use(sampling)
            step.start(0, prompt * 2, limit=3, eos_ids=())
            step.run(budget=RowBudget(config, [1.0] * 3))
        self.state.end()

    def runner(
        self,
        config: LookaheadConfig,
        sampling: SamplingConfig,
        processor: LogitsProcessor | None = None,
        keep_records: bool = False,
        keep_logits: bool = False,
    ) -> StepRunner:
        """Who runs this configuration's steps, with no request."""
        # A batch that was dropped left its sequences running, and maybe a step in flight.
        (self.pipeline or EagerStep(self.step)).end()
        if self.step.config != config:
            self.pipeline = None  # its memory is free before the next one's is taken
            self.step = self._new_step(config)
        draws_before = self.step.sampler.is_needed
        self.step.sampler.use(sampling, processor)
        if self.step.sampler.is_needed != draws_before:
            self.pipeline = None  # other operations are to be recorded
        if not self.is_recorded or keep_records or keep_logits or processor is not None:
            return EagerStep(self.step, keep_records, keep_logits)
        if self.pipeline is None:  # it records for seconds, while nothing else runs
            self.pipeline = PipelinedStep(self.step, self._recorder)
        return self.pipeline

    def _new_step(self, config: LookaheadConfig) -> Step:
        fixed_shape = self.is_recorded or None
        return Step(self._model, self.kv_cache, self.state, config, fixed_shape)
