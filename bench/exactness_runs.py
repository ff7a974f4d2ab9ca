"""Each configuration at each batch size, and another seed, against autoregressive decoding alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from decode_modes import Job, full_label
from exactness_plan import Plan
from exactness_texts import Text, compare_texts

from lookahead import Engine, LookaheadConfig
from lookahead.config import AUTOREGRESSIVE, MAX_SEED, SamplingConfig


class Comparison:
    """One model behind an engine for each batch size."""

    def __init__(self, plan: Plan, engine: Engine) -> None:
        """`engine` runs one prompt at a time."""
        self._plan = plan
        self._alone = engine
        self._engines = {
            batch: engine
            if batch == 1
            else Engine(
                engine.model,
                engine.tokenizer,
                max_length=engine.max_length,
                batch_size=batch,
                max_step_rows=engine.max_step_rows,
            )
            for batch in plan.batches
        }

    def compare(self, jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
        """What was found on each of these prompts, which run together where there is a batch for it."""
        sampling = self._plan.sampling
        plain = self._run(self._alone, jobs, AUTOREGRESSIVE, sampling)
        found: list[list[dict[str, Any]]] = [[] for _ in jobs]

        def add(name: str, texts: Sequence[Text], is_promised: bool) -> None:
            for of_job, alone, text in zip(found, plain, texts, strict=True):
                compared = compare_texts(alone, text)
                of_job.append({"name": name, "is_promised": is_promised, **compared})

        for batch, engine in self._engines.items():
            behind = "" if batch == 1 else f", batch {batch}"
            configs = self._plan.configs if batch == 1 else [AUTOREGRESSIVE, *self._plan.configs]
            for config in configs:
                texts = self._run(engine, jobs, config, sampling)
                add(f"{full_label(config)}{behind}", texts, is_promised=True)
        if sampling.temperature:
            other = replace(sampling, seed=(sampling.seed + 1) % (MAX_SEED + 1))
            texts = self._run(self._alone, jobs, AUTOREGRESSIVE, other)
            add("autoregressive, another seed", texts, is_promised=False)
        return found

    def _run(
        self,
        engine: Engine,
        jobs: Sequence[Job],
        config: LookaheadConfig,
        sampling: SamplingConfig,
    ) -> list[Text]:
        options = self._plan.options
        rows: list[list[torch.Tensor]] = [[] for _ in jobs]
        results = engine.batch(
            [job.token_ids for job in jobs],
            max_new_tokens=options.max_new_tokens,
            mode="autoregressive" if config == AUTOREGRESSIVE else "lookahead",
            lookahead=config,
            sampling=sampling,
            on_logits=lambda number, logits: rows[number].append(logits.clone()),
            logprobs=options.logprobs,
        ).run_to_end()
        return [
            Text(result.token_ids, torch.cat(of_job), result.logprobs)
            for result, of_job in zip(results, rows, strict=True)
        ]
