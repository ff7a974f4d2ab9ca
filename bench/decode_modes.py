"""The ways of decoding that `decode.py` compares: which there are, whether they agree, and their runs.

Knows runs and ids; what is made of them is `decode_figures.py`'s business.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import timing
from tqdm import tqdm

from lookahead import Engine, LookaheadConfig
from lookahead.compare import first_difference
from lookahead.config import AUTOREGRESSIVE, MAX_STEP_ROWS, SamplingConfig
from lookahead.drafting.ngram_pool import ORIGINS
from lookahead.errors import InputError
from lookahead.layout import LookaheadLayout
from lookahead.results import Result
from lookahead.step_output import StepRecord

WARM_UP_TOKENS = 16
NOT_EXACT = "autoregressive, not exact"
TUNED = "tuned"
# Rows that a step may have by default, of which the engine's own choice takes what it wants.
DEFAULT_STEP_ROWS = 128

Trace = Callable[[StepRecord], None]


@dataclass(frozen=True)
class Run:
    """One prompt decoded: its new ids, and how many of them came in how many steps and seconds; rows of
    a step are not known of a peer."""

    token_ids: list[int]
    tokens: int
    steps: int
    seconds: float
    rows_per_step: float | None = None


@dataclass(frozen=True)
class Mode:
    """A way of decoding. `run` takes prompt ids, the most new tokens, and a trace or None.

    `config` is None for a peer.
    """

    label: str
    config: LookaheadConfig | None
    run: Callable[[list[int], int, Trace | None], Run]

    @property
    def is_autoregressive(self) -> bool:
        return self.config == AUTOREGRESSIVE

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(W, N, G) where it means something."""
        if self.config is None or self.is_autoregressive:
            return None
        return self.config.window, self.config.ngram, self.config.guesses

    def __str__(self) -> str:
        return f"{self.label} {self.shape}" if self.shape else self.label


@dataclass(frozen=True)
class Job:
    """A prompt in this checkpoint's ids."""

    prompt: timing.Prompt
    token_ids: list[int]


class OutputsDiffer(Exception):
    """Two modes gave different ids where they must not. Says which, where and what."""


def parse_configs(text: str, may_be_empty: bool = False) -> list[LookaheadConfig]:
    """ "5,4,5;15,5,15" -> two configurations; raises InputError for anything else, and for no
    configuration unless that may be."""
    configs: list[LookaheadConfig] = []
    if may_be_empty and not text.strip():
        return configs
    for part in text.split(";"):
        numbers = [number.strip() for number in part.split(",")]
        if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
            raise InputError(
                f'--configs: expected "W,N,G;W,N,G", like "5,4,5;15,5,15", got {text!r}'
            )
        config = LookaheadConfig(*map(int, numbers))
        num_rows = LookaheadLayout.count_rows(config.window, config.ngram, config.guesses)
        if num_rows > MAX_STEP_ROWS:
            raise InputError(
                f"--configs: {part.strip()} takes {num_rows} rows a step, expected at most "
                f"{MAX_STEP_ROWS}"
            )
        if config.guesses == 0:
            raise InputError(
                f"--configs: {part.strip()} verifies nothing, expected G of at least 1"
            )
        configs.append(config)
    return list(dict.fromkeys(configs))


def step_rows(configs: Iterable[LookaheadConfig]) -> int:
    """Rows that a step of an engine must have room for: for these, and for the engine's own choice."""
    shapes = [(config.window, config.ngram, config.guesses) for config in configs]
    return max([DEFAULT_STEP_ROWS, *(LookaheadLayout.count_rows(*shape) for shape in shapes)])


def autoregressive_mode(engine: Engine, sampling: SamplingConfig) -> Mode:
    """One row a step. Without exactness no ids are promised, but what is timed against it is timed
    against the fastest of both on each prompt."""
    name = "autoregressive" if engine.model.inexact_reason is None else NOT_EXACT
    return _engine_mode(engine, name, AUTOREGRESSIVE, sampling)


def tuned_mode(engine: Engine, config: LookaheadConfig, sampling: SamplingConfig) -> Mode:
    """What the engine does unless it is told otherwise: `config` is its own choice, or that of an
    engine that is like it but for its dtype."""
    return _engine_mode(engine, TUNED, config, sampling)


def drafting_modes(
    engine: Engine, configs: Iterable[LookaheadConfig], sampling: SamplingConfig
) -> list[Mode]:
    """For each configuration: window and prompt n-grams, window only, pool only."""
    wanted: dict[LookaheadConfig, None] = {}
    for config in configs:
        wanted |= dict.fromkeys(window_configs(config))
        wanted[replace(config, window=0)] = None
    return [_engine_mode(engine, label(config), config, sampling) for config in wanted]


def window_modes(
    engine: Engine, configs: Iterable[LookaheadConfig], sampling: SamplingConfig
) -> list[Mode]:
    """For each configuration: with prompt n-grams and without."""
    wanted = dict.fromkeys(each for config in configs for each in window_configs(config))
    return [_engine_mode(engine, label(config), config, sampling) for config in wanted]


def window_configs(config: LookaheadConfig) -> list[LookaheadConfig]:
    """With and without prompt n-grams; without a window there is only the pool."""
    return [config, replace(config, prompt_ngrams=False)] if config.window else [config]


def label(config: LookaheadConfig) -> str:
    """What a row may be called: lookahead decoding has a window and n-grams of at least 3 tokens; only
    the engine's own choice is adaptive."""
    if config.adaptive:
        return TUNED
    if config.window == 0:
        return "pool only"
    name = "lookahead" if config.ngram >= 3 else f"window of {config.ngram}-grams"
    return name if config.prompt_ngrams else f"{name}, window only"


def full_label(config: LookaheadConfig) -> str:
    """The same with (W, N, G), and autoregressive decoding by its name."""
    if config == AUTOREGRESSIVE:
        return "autoregressive"
    return f"{label(config)} {(config.window, config.ngram, config.guesses)}"


def run_of(result: Result) -> Run:
    """A result of the engine's as a run."""
    return Run(
        result.token_ids,
        result.new_tokens,
        result.steps,
        result.decode_seconds,
        result.rows_per_step,
    )


def _engine_mode(
    engine: Engine, name: str, config: LookaheadConfig, sampling: SamplingConfig
) -> Mode:
    kind = "autoregressive" if config == AUTOREGRESSIVE else "lookahead"

    def run(token_ids: list[int], max_new_tokens: int, trace: Trace | None = None) -> Run:
        result = engine.generate(
            token_ids,
            max_new_tokens=max_new_tokens,
            mode=kind,
            lookahead=config,
            sampling=sampling,
            trace=trace,
        )
        return run_of(result)

    return Mode(name, config, run)


class AcceptedTokens:
    """A trace that counts tokens beyond the one a step gives anyway, by where their n-gram came from.

    A step that ends the request inside a candidate has that candidate's last token as its one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, record: StepRecord) -> None:
        if record.winner is not None:
            self.counts[record.origins[record.winner]] += len(record.emitted) - 1

    def to_dict(self) -> dict[str, int]:
        return {origin: self.counts[origin] for origin in ORIGINS}


def check_modes(
    modes: Sequence[Mode], jobs: Sequence[Job], max_new_tokens: int, show: Callable[[int], str]
) -> list[AcceptedTokens]:
    """Run everything once and raise OutputsDiffer at the first id that is not the first mode's.

    `show` writes an id for the message. Returns what was accepted in each mode.
    """
    accepted = [AcceptedTokens() for _ in modes]
    with _progress("same ids in float32?", len(jobs) * len(modes)) as progress:
        for job in jobs:
            expected: Run | None = None
            for mode, counts in zip(modes, accepted, strict=True):
                run = mode.run(job.token_ids, max_new_tokens, counts)
                expected = expected or run
                require_same(job, (modes[0], expected), (mode, run), show)
                progress.update()
    return accepted


def require_same(
    job: Job, first: tuple[Mode, Run], other: tuple[Mode, Run], show: Callable[[int], str]
) -> None:
    """Raise OutputsDiffer unless both runs gave the same ids."""
    ids = first[1].token_ids, other[1].token_ids
    place = first_difference(*ids)
    if place is not None:
        got = [show(each[place]) if place < len(each) else "the end" for each in ids]
        raise OutputsDiffer(
            f"prompt {job.prompt.id} differs in float32 at new token {place}: "
            f"{first[0]} gives {got[0]}, {other[0]} gives {got[1]}"
        )


def time_modes(
    modes: Sequence[Mode], jobs: Sequence[Job], max_new_tokens: int, repeats: int
) -> list[list[list[Run]]]:
    """Runs by mode, prompt and repeat. On each prompt all modes run in turn, each time beginning with
    another one, so that a machine that grows slower does so for all."""
    for mode in modes:
        mode.run(jobs[0].token_ids, min(max_new_tokens, WARM_UP_TOKENS), None)
    runs: list[list[list[Run]]] = [[[] for _ in jobs] for _ in modes]
    with _progress("timing", repeats * len(jobs) * len(modes)) as progress:
        for turn in range(repeats * len(jobs)):
            number = turn % len(jobs)
            for place in range(len(modes)):
                index = (turn + place) % len(modes)
                run = modes[index].run(jobs[number].token_ids, max_new_tokens, None)
                runs[index][number].append(run)
                progress.update()
    return runs


def require_same_runs(
    modes: Sequence[Mode],
    jobs: Sequence[Job],
    runs: Sequence[Sequence[Sequence[Run]]],
    show: Callable[[int], str],
) -> None:
    """`require_same` for all runs of `time_modes`: those on prompts that were not checked too."""
    for mode, of_mode in zip(modes, runs, strict=True):
        if mode.label == NOT_EXACT:
            continue
        for job, repeats, plain in zip(jobs, of_mode, runs[0], strict=True):
            for run in repeats:
                require_same(job, (modes[0], plain[0]), (mode, run), show)


def count_steps(
    modes: Sequence[Mode], jobs: Sequence[Job], max_new_tokens: int
) -> tuple[list[list[Run]], list[AcceptedTokens]]:
    """Run everything once; return the runs by mode and prompt, and what was accepted in each mode."""
    accepted = [AcceptedTokens() for _ in modes]
    runs: list[list[Run]] = [[] for _ in modes]
    with _progress("counting steps", len(jobs) * len(modes)) as progress:
        for job in jobs:
            for mode, of_mode, counts in zip(modes, runs, accepted, strict=True):
                of_mode.append(mode.run(job.token_ids, max_new_tokens, counts))
                progress.update()
    return runs, accepted


def _progress(what: str, num_runs: int) -> tqdm:
    # disable=None: a bar on a terminal, nothing elsewhere
    return tqdm(total=num_runs, desc=what, unit="run", leave=False, disable=None)
