"""Models small enough to enumerate: random LLaMA checkpoints, and models that follow a script.

Knows how to put either under the engine or under a bare step. Every cache starts out full of NaN, so
that whatever is read before it was written shows.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lookahead.config import LookaheadConfig, ModelConfig, RopeConfig
from lookahead.decode_state import DecodeState
from lookahead.detokenizer import ByteRule, Decoding, IncrementalDetokenizer
from lookahead.drafting.ngram_pool import ORIGINS
from lookahead.engine import Engine
from lookahead.kernels.largest_logit import largest_logit
from lookahead.kv_cache import KVCache
from lookahead.layout import RowTree
from lookahead.models.checkpoint_config import parse_model_config
from lookahead.models.llama import Llama
from lookahead.models.weights import LlamaWeights
from lookahead.prefill import prefill
from lookahead.step import Step
from lookahead.step_costs import StepCosts
from lookahead.step_graph import Recorder

SPARE_ROWS = 128
MAX_EOS_IDS = 3
CPU = torch.device("cpu")

# The next token after all the ids of a path, or nan or inf for logits that are all that.
Script = Callable[[tuple[int, ...]], float]


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads only slow tensors this small, and much so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_llama(
    checkpoint: tuple[dict[str, torch.Tensor], dict],
    dtype: torch.dtype = torch.float64,
    num_positions: int = 512,
    implementation: str = "numba",
    device: torch.device = CPU,
    exact: bool = True,
) -> Llama:
    """The engine's model with the weights of `random_checkpoint`."""
    tensors, fields = checkpoint
    config = parse_model_config(fields, {})
    weights = LlamaWeights.empty(config, dtype, device)
    targets = weights.targets(config)
    assert set(targets) == set(tensors)
    for name, target in targets.items():
        target.copy_(tensors[name])
    return Llama(config, weights, num_positions, implementation, exact)


class ScriptedModel:
    """A model whose next token is a function of the ids that a row sees.

    It has no other memory than the cache that it is given: a row's key is its token and its value is
    its position, so a row that was committed to the wrong place is found out at the next step. What it
    says after a dead row is NaN.
    """

    def __init__(
        self,
        script: Script,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        max_position_embeddings: int = 512,
    ) -> None:
        self.script = script
        self.dtype = torch.float64
        self.device = CPU
        self.inexact_reason = "a script computes nothing"
        self.row_block = None
        self.implementation = "torch"
        self.config = ModelConfig(
            vocab_size=vocab_size,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_q_heads=1,
            num_kv_heads=1,
            head_dim=1,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=1e-5,
            rope=RopeConfig(),
            eos_token_ids=eos_token_ids,
        )

    def new_cache(self, batch_size: int, max_length: int, scratch_rows: int) -> KVCache:
        shape = (1, 2, batch_size, 1, max_length + scratch_rows, 1)
        return KVCache(torch.zeros(shape, dtype=self.dtype), max_length)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
    ) -> torch.Tensor:
        """[B, T] -> [B, T, 1], the next token after each row."""
        start, num_rows = cache.row_start, layout.num_rows
        assert tokens.shape == positions.shape == (lengths.shape[0], num_rows)
        keys, values = (part[:, 0, :, 0] for part in cache.layer(0))
        keys[:, start : start + num_rows] = tokens.to(self.dtype)
        values[:, start : start + num_rows] = positions.to(self.dtype)
        hidden = torch.full((*tokens.shape, 1), math.nan, dtype=self.dtype)
        for sequence, (length, live) in enumerate(
            zip(lengths.tolist(), live_rows.tolist(), strict=True)
        ):
            for row in range(live):
                seen = [*range(length), *(start + ancestor for ancestor in layout.path(row))]
                assert values[sequence, seen].tolist() == list(range(len(seen)))
                path = tuple(int(token) for token in keys[sequence, seen].tolist())
                hidden[sequence, row, 0] = self.script(path)
        return hidden

    def choose(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: RowTree,
        cache: KVCache,
        lengths: torch.Tensor,
        live_rows: torch.Tensor,
        rows: torch.Tensor,
        kept: dict | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`forward`, the logits at these rows, and the largest of each."""
        hidden = self.forward(tokens, positions, layout, cache, lengths, live_rows)
        logits = self.logits(hidden.flatten(0, 1)[rows])
        return logits, *largest_logit(logits)

    def prepare(self, row_counts: Iterable[int], logit_counts: Iterable[int]) -> None:
        """Nothing depends on how many rows run."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., 1] -> [..., vocab], one-hot."""
        is_next = torch.arange(self.config.vocab_size) == hidden
        return torch.where(hidden.isfinite(), is_next.to(self.dtype), hidden)


class FragmentTokenizer:
    """Id i is the i-th fragment: text, raw bytes, or None for an id that is not shown."""

    def __init__(self, fragments: Sequence[str | bytes | None]) -> None:
        self.fragments = list(fragments)
        self.vocab_size = len(self.fragments)

    def encode(self, text: str) -> list[int]:
        """Each character by its own fragment."""
        return [self.fragments.index(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            Decoding(self.fragments.__getitem__, ByteRule.SEQUENCE, strip_left=0)
        )


def letters(vocab_size: int) -> FragmentTokenizer:
    """One letter an id: a, b, c, ..."""
    return FragmentTokenizer([chr(ord("a") + token) for token in range(vocab_size)])


def build_engine(
    model: Llama | ScriptedModel,
    tokenizer: FragmentTokenizer | None = None,
    max_length: int = 128,
    batch_size: int = 1,
    costs: StepCosts | None = None,
    recorder: Recorder | None = None,
) -> Engine:
    tokenizer = tokenizer or letters(model.config.vocab_size)
    engine = Engine(
        model,
        tokenizer,
        max_length=max_length,
        batch_size=batch_size,
        costs=costs,
        recorder=recorder,
    )
    engine_cache(engine).data.fill_(math.nan)
    return engine


def engine_cache(engine: Engine) -> KVCache:
    return engine._steps.kv_cache


def build_step(
    model: Llama | ScriptedModel,
    config: LookaheadConfig,
    max_length: int = 128,
    batch_size: int = 1,
) -> Step:
    """A step over buffers of its own."""
    cache = model.new_cache(batch_size, max_length, SPARE_ROWS)
    cache.data.fill_(math.nan)
    state = DecodeState(batch_size, max_length, SPARE_ROWS, MAX_EOS_IDS, model.device)
    return Step(model, cache, state, config)


@torch.inference_mode()
def start_step(
    step: Step,
    prompt: Sequence[int],
    limit: int,
    eos_ids: tuple[int, ...] = (),
    sequence: int = 0,
) -> None:
    """Begin a request in one sequence of a step: prompt prefilled, text to end at `limit` ids."""
    step.start(sequence, list(prompt), limit, eos_ids)
    prefill(step.model, step.kv_cache.sequence(sequence), torch.tensor(prompt[:-1]).long())


def text_of(step: Step, sequence: int = 0) -> list[int]:
    """Prompt and emitted ids."""
    return step.state.tokens[sequence, : int(step.state.lengths[sequence]) + 1].tolist()


def pool_of(step: Step, sequence: int = 0) -> dict[int, list[tuple[tuple[int, ...], str]]]:
    """Continuations and their origins by key, most recent first; keys that have some."""
    pool = step.pool
    counts = pool.counts[sequence].tolist()
    return {
        key: [
            (tuple(gram), ORIGINS[origin])
            for gram, origin in zip(
                pool.entries[sequence, key, :count].tolist(),
                pool.origins[sequence, key, :count].tolist(),
                strict=True,
            )
        ]
        for key, count in enumerate(counts)
        if count
    }


def run_request(engine, prompt, shape, **options):
    """Stream one request; check what always holds; return the result and the ids of each step."""
    records = []
    config = LookaheadConfig(*shape)
    stream = engine.stream(prompt, lookahead=config, trace=records.append, **options)
    chunks = list(stream)
    result = stream.result
    assert stream.is_done
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert result.new_tokens == len(result.token_ids)
    assert result.steps == len(records)
    return result, [record.emitted for record in records]
