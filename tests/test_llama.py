"""The forward pass: right numbers, against transformers and against a naive model in float64."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.naive_llama import naive_logits, random_checkpoint
from safetensors.torch import save_file
from torch import Tensor

from lookahead import Engine
from lookahead.kv_cache import KVCache
from lookahead.layout import LookaheadLayout, RowTree
from lookahead.models.checkpoint_config import read_model_config
from lookahead.models.llama import Llama
from lookahead.models.loader import load_weights
from lookahead.prefill import CHUNK_ROWS, prefill

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
SMOLLM2 = Path(__file__).parent.parent / "checkpoints" / "smollm2-135m-instruct"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FEATURES: dict[str, dict[str, Any]] = {
    "GQA 1": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "GQA 3": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24},
    "GQA 4": {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 32},
    "one key/value head": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24},
    "tied": {"tie_word_embeddings": True},
    "narrow heads": {"head_dim": 2},
    "wide heads": {"head_dim": 10},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "both biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "rope_theta": {"rope_theta": 100.0},
    "rms_norm_eps": {"rms_norm_eps": 0.1},
    "llama3": {"head_dim": 16, "rope_theta": 100.0, "rope_scaling": LLAMA3},
    "llama3, larger theta": {"head_dim": 16, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "rope_parameters llama3": {
        "head_dim": 16,
        "rope_parameters": {**LLAMA3, "rope_theta": 100.0},
    },
}


def random_model(seed: int, **fields: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`random_checkpoint` with `mlp_bias` and the newer spelling of the rotary keys as well."""
    mlp_bias, rope_parameters = fields.pop("mlp_bias", False), fields.pop("rope_parameters", None)
    tensors, config = random_checkpoint(seed, vocab_size=23, **fields)
    if mlp_bias:
        config["mlp_bias"] = True
        generator = torch.Generator().manual_seed(seed)
        for name in [name for name in tensors if ".mlp." in name]:
            bias = torch.randn(tensors[name].shape[0], generator=generator)
            tensors[name.replace("weight", "bias")] = (0.3 * bias).bfloat16().double()
    if rope_parameters is not None:
        del config["rope_theta"], config["rope_scaling"]
        config["rope_parameters"] = rope_parameters
    return tensors, config


def write(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load(directory: Path, dtype: torch.dtype = torch.float64, num_positions: int = 512) -> Llama:
    config = read_model_config(directory)
    return Llama(config, load_weights(directory, config, dtype, CPU), num_positions)


def from_transformers(directory: Path) -> Any:
    """Their model in float32, its attention not forced through float32 when it is made float64."""
    model = transformers.LlamaForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.requires_grad_(False)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 23, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def poisoned_cache(model: Llama, max_length: int, num_rows: int) -> KVCache:
    cache = model.new_cache(1, max_length, num_rows)
    cache.data.fill_(float("nan"))
    return cache


def forward(model: Llama, cache: KVCache, ids: list[int], length: int, layout: RowTree) -> Tensor:
    """Hidden states [T, hidden] of one step behind `length` committed tokens."""
    positions = length + torch.tensor([layout.depths])
    lengths, live = torch.tensor([length]), torch.tensor([layout.num_rows])
    return model.forward(torch.tensor([ids]), positions, layout, cache, lengths, live)[0]


def chain_logits(model: Llama, ids: list[int]) -> Tensor:
    """Logits [P, vocab] after every position, all in one chunk."""
    cache = poisoned_cache(model, 4, len(ids))
    return model.logits(forward(model, cache, ids, 0, RowTree.chain(len(ids))))


@pytest.mark.parametrize("feature", FEATURES)
def test_every_configuration_feature(tmp_path, feature):
    tensors, config = random_model(7, **FEATURES[feature])
    write(tmp_path, tensors, config)
    ids = random_ids(90)
    expected = naive_logits(tensors, config, ids)
    logits = chain_logits(load(tmp_path), ids)
    assert logits.shape == (90, 23)
    assert logits.dtype == torch.float64
    scale = expected.abs().amax(1, keepdim=True)
    assert ((logits - expected).abs() <= 1e-11 * scale).all()

    their_logits = from_transformers(tmp_path)(torch.tensor([ids])).logits[0]
    logits = chain_logits(load(tmp_path, torch.float32), ids)
    assert logits.dtype == torch.float32
    assert ((logits - their_logits).abs() <= 2e-4 * scale).all()


@pytest.mark.parametrize("feature", ["GQA 3", "attention_bias", "llama3"])
def test_each_row_of_a_tree_continues_its_own_path(tmp_path, feature):
    tensors, config = random_model(3, **FEATURES[feature])
    model = load(write(tmp_path, tensors, config))
    prefix, layout = random_ids(37), LookaheadLayout(3, 4, 2)
    rows = random_ids(layout.num_rows, seed=1)
    cache = poisoned_cache(model, 60, CHUNK_ROWS)
    prefill(model, cache, torch.tensor(prefix))
    logits = model.logits(forward(model, cache, rows, len(prefix), layout))
    for row in range(layout.num_rows):
        path = [rows[ancestor] for ancestor in layout.path(row)]
        expected = naive_logits(tensors, config, prefix + path)[-1]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-11 * expected.abs().max())


def test_sequences_of_a_batch_do_not_meet(tmp_path):
    model = load(write(tmp_path, *random_model(3)))
    layout = RowTree.chain(6)
    lengths = [0, 19, 70]
    prompts = [random_ids(length, seed=length) for length in lengths]
    rows = [random_ids(6, seed=seed) for seed in (10, 11, 12)]
    cache = model.new_cache(3, 80, CHUNK_ROWS)
    cache.data.fill_(float("nan"))
    for sequence, prompt in enumerate(prompts):
        prefill(model, cache.sequence(sequence), torch.tensor(prompt, dtype=torch.int64))
    together = model.forward(
        torch.tensor(rows),
        torch.tensor(lengths).unsqueeze(1) + torch.tensor(layout.depths),
        layout,
        cache,
        torch.tensor(lengths),
        torch.tensor([6, 6, 6]),
    )
    for sequence, length in enumerate(lengths):
        alone = poisoned_cache(model, 80, CHUNK_ROWS)
        prefill(model, alone, torch.tensor(prompts[sequence], dtype=torch.int64))
        hidden = forward(model, alone, rows[sequence], length, layout)
        torch.testing.assert_close(together[sequence], hidden, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 256, 257])
def test_prefill_in_chunks_is_one_pass(tmp_path, count):
    tensors, config = random_model(4, num_hidden_layers=3)
    model = load(write(tmp_path, tensors, config))
    ids = torch.tensor(random_ids(count))
    chunked = poisoned_cache(model, 300, CHUNK_ROWS)
    prefill(model, chunked, ids)
    whole = poisoned_cache(model, 300, count)
    forward(model, whole, ids.tolist(), 0, RowTree.chain(count))
    expected = whole.data[:, :, :, :, 300:]
    actual = chunked.data[:, :, :, :, :count]
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    assert chunked.data[:, :, :, :, count:300].isnan().all()
    # and what comes next sees all of it
    hidden = forward(model, chunked, [5], count, RowTree.chain(1))
    expected = naive_logits(tensors, config, [*ids.tolist(), 5])[-1]
    torch.testing.assert_close(model.logits(hidden)[0], expected, rtol=1e-10, atol=1e-10)


PROMPTS = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "import json\n\n\nclass Config:\n    def __init__(self, path):\n        self.path = path\n\n"
    "    def load(self):\n",
    "for (int i = 0; i < count; i++) {\n    if (values[i] > largest) {\n",
    "The three laws of motion are as follows. First,",
    "<|im_start|>user\nName four seasons and a fruit for each.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 17 + 25? Explain step by step.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea, there lived a",
    "| city | country |\n|---|---|\n| Paris | France |\n| Rome |",
]
LONG_PROMPT = "".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(2, 22))


@pytest.fixture(scope="module")
def engine() -> Engine:
    if not SMOLLM2.is_dir():
        pytest.skip("the SmolLM2 checkpoint is not there; `make test` makes it")
    return Engine.load(SMOLLM2, device="cpu", dtype="float32", max_length=512)


@pytest.fixture(scope="module")
def theirs(engine: Engine) -> Any:
    return from_transformers(SMOLLM2)


@pytest.fixture(scope="module")
def truth(theirs: Any) -> Any:
    """transformers' model in float64, its RMSNorm too, which goes through float32 by itself."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def norm(self: Any, hidden: Tensor) -> Tensor:
        scale = torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (hidden * scale)

    model = copy.deepcopy(theirs).double()
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = norm.__get__(module)
    return model


@pytest.fixture(scope="module")
def fast_engine() -> Engine:
    return Engine.load(SMOLLM2, device="cpu", dtype="float32", max_length=512, exact=False)


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize(
    "prompt", [PROMPTS[1], PROMPTS[4], LONG_PROMPT], ids=["code", "chat", "long"]
)
def test_smollm2_logits_are_as_near_to_float64_as_those_of_transformers(
    engine, fast_engine, theirs, truth, prompt, is_exact
):
    """Exact products sum in one long chain, so they err more than those that are cut by shape."""
    engine, times = (engine, 2.0) if is_exact else (fast_engine, 1.5)
    ids = engine.tokenizer.encode(prompt)
    exact = truth(torch.tensor([ids])).logits[0]
    their_error = (theirs(torch.tensor([ids])).logits[0] - exact).abs()
    cache = poisoned_cache(engine.model, 512, CHUNK_ROWS)
    logits = []
    for start in range(0, len(ids), CHUNK_ROWS):
        prefill(engine.model, cache, torch.tensor(ids[:start], dtype=torch.int64))
        chunk = ids[start : start + CHUNK_ROWS]
        hidden = forward(engine.model, cache, chunk, start, RowTree.chain(len(chunk)))
        logits.append(engine.model.logits(hidden))
    error = (torch.cat(logits) - exact).abs()
    # Which row has a large error is chance, and differs from processor to processor: between their own
    # two kinds of attention one row's differs by up to three times. How large the largest is, and an
    # ordinary one, is not.
    for name, of_rows in (
        ("largest", lambda error: error.amax(1)),
        ("root mean square", lambda error: error.square().mean(1).sqrt()),
    ):
        ours, theirs_ = of_rows(error), of_rows(their_error)
        print(
            f"{name} error of a row over theirs: {ours.max() / theirs_.max():.2f} of the largest, "
            f"{ours.mean() / theirs_.mean():.2f} of the mean, {(ours / theirs_).median():.2f} in the "
            "middle"
        )
        assert ours.max() <= (times + 0.5) * theirs_.max()
        assert ours.mean() <= times * theirs_.mean()
        assert (ours / theirs_).median() <= times


@pytest.mark.parametrize("prompt", PROMPTS)
def test_smollm2_writes_what_transformers_writes(engine, theirs, prompt):
    """Feeding transformers the text, its most likely token is everywhere the one that follows."""
    ids = engine.tokenizer.encode(prompt)
    lookahead = engine.generate(prompt, max_new_tokens=64, ignore_eos=True)
    autoregressive = engine.generate(
        prompt, max_new_tokens=64, ignore_eos=True, mode="autoregressive"
    )
    assert len(autoregressive.token_ids) == autoregressive.steps == 64
    text = torch.tensor([ids + autoregressive.token_ids])
    logits = theirs(text).logits[0, len(ids) - 1 : -1]
    assert logits.argmax(1).tolist() == autoregressive.token_ids
    assert lookahead.token_ids == autoregressive.token_ids
    assert lookahead.steps < 64
