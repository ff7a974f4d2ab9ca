"""The recorded runs of a trace as ways of decoding on a model of random weights.

Knows which run belongs to which prompt and mode, and that a replay must end as its recording did.
"""

from collections.abc import Callable, Sequence

import decode_modes
import torch
from decode_modes import Mode, Run
from shapes import random_engine
from trace_file import RecordedPrompt
from trace_model import Forcer, RowsDiffer, watched
from trace_record import most_rows

from lookahead import Engine, LookaheadConfig
from lookahead.config import AUTOREGRESSIVE, ModelConfig
from lookahead.layout import LookaheadLayout


class Replayer:
    """Engines of a shape, and their modes.

    Attributes:
        modes: autoregressive decoding first; on a GPU also without exactness, as `decode.py` has it.
        is_checked: whether each step's rows are compared with the recorded ones, for which the host
            waits for every step.
    """

    def __init__(
        self,
        prompts: Sequence[RecordedPrompt],
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
    ) -> None:
        self.is_checked = False
        self._runs = {
            (tuple(prompt.token_ids), run.config): run for prompt in prompts for run in prompt.runs
        }
        configs = [run.config for run in prompts[0].runs]
        layouts = [LookaheadLayout(each.window, each.ngram, each.guesses) for each in configs]
        most_logits = max(len(layout.logit_rows) for layout in layouts)

        def start(exact: bool) -> tuple[Engine, Forcer]:
            engine = random_engine(config, dtype, device, max_length, most_rows(configs), exact)
            return engine, Forcer(engine.model, list(self._runs.values()), most_logits)

        first = start(exact=True)
        self.modes = [
            Mode(decode_modes.label(each), each, self._replay(*first, each))
            if each != AUTOREGRESSIVE
            else Mode("autoregressive", each, self._replay(*first, each))
            for each in configs
        ]
        if device.type == "cuda":  # on a CPU exactness costs nothing
            inexact = self._replay(*start(exact=False), AUTOREGRESSIVE)
            self.modes.insert(1, Mode(decode_modes.NOT_EXACT, AUTOREGRESSIVE, inexact))

    def _replay(
        self, engine: Engine, forcer: Forcer, config: LookaheadConfig
    ) -> Callable[[list[int], int, decode_modes.Trace | None], Run]:
        mode = "autoregressive" if config == AUTOREGRESSIVE else "lookahead"

        def run(
            token_ids: list[int], max_new_tokens: int, trace: decode_modes.Trace | None = None
        ) -> Run:
            recorded = self._runs[tuple(token_ids), config]
            expected = recorded.token_ids[:max_new_tokens]
            forcer.begin(recorded, self.is_checked)
            with watched(engine.model, forcer):
                batch = engine.batch(
                    [token_ids],
                    max_new_tokens=len(expected),
                    mode=mode,
                    lookahead=config,
                    trace=trace,
                )
                # Where steps are recorded on a GPU they ran for it, and took answers.
                forcer.begin(recorded, self.is_checked)
                (result,) = batch.run_to_end()
            is_whole = len(expected) == len(recorded.token_ids)
            if result.token_ids != expected or (is_whole and result.steps != recorded.steps):
                raise RowsDiffer(
                    f"{mode} took {result.steps} steps for {result.new_tokens} tokens, which are not "
                    f"those of the recording's {recorded.steps} steps"
                )
            return decode_modes.run_of(result)

        return run
