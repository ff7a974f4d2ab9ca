"""What the Python interface refuses, in one line that says what was expected."""

import pytest
import torch
from tiny_checkpoint import edit_json, write_tiny_checkpoint

from lookahead import Engine, InputError

PROMPT = "abc abd abc"
EMPTY = "the prompt is empty: after tokenising it has no tokens, expected at least 1"
NEITHER = "a prompt must be text or a list of token ids, got "


@pytest.fixture(scope="module")
def engine(checkpoint) -> Engine:
    return Engine.load(checkpoint, device="cpu", dtype="float32")


def refusal(function, *arguments, **options) -> str:
    with pytest.raises(InputError) as caught:
        function(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_length": 1}, "max_length must be a whole number of at least 2, got 1"),
        ({"max_length": 513}, "max_length 513 is more than the 512 positions of the model"),
        ({"max_length": 20.0}, "max_length must be a whole number of at least 2, got 20.0"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": True}, "batch_size must be a whole number of at least 1, got True"),
        ({"max_step_rows": 1}, "max_step_rows must be a whole number from 2 to 65536, got 1"),
        (
            {"device": "tpu"},
            "device 'tpu' is not known, expected auto, cpu, cuda or cuda:INDEX",
        ),
        (
            {"dtype": "int8"},
            "dtype 'int8' is not known, expected auto, bfloat16, float16, float32, float64",
        ),
    ],
)
def test_loading_refuses(checkpoint, options, said):
    assert refusal(Engine.load, checkpoint, **options) == said


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path)
    edit_json(checkpoint / "config.json", vocab_size=256, eos_token_id=None)
    assert refusal(Engine.load, checkpoint) == (
        f"{checkpoint}: the tokenizer has ids up to 256, expected fewer than the vocab_size 256 of "
        "config.json"
    )


def test_too_little_memory_is_refused(checkpoint):
    # More bytes than a process can address.
    said = refusal(Engine.load, checkpoint, device="cpu", dtype="float32", batch_size=2**31 - 1)
    assert said == (
        f"{checkpoint} as float32 with max_length 512 does not fit into the memory of cpu; take "
        "a shorter max_length, a smaller dtype or another device"
    )


def test_ids_may_come_one_by_one(engine):
    expected = engine.generate([1, 2, 3], max_new_tokens=6).token_ids
    for method in (engine.generate, engine.compare):
        assert method((token for token in [1, 2, 3]), max_new_tokens=6).token_ids == expected
    assert refusal(engine.compare, ["a", "b"]) == f"{NEITHER}['a', 'b']"


@pytest.mark.parametrize("method", ["stream", "session", "compare"])
def test_several_answers_are_for_a_batch(engine, method):
    said = refusal(getattr(engine, method), PROMPT, num_samples=2)
    assert said == "a stream is of one answer, got 2: use `batch` for several"
    assert len(engine.generate(PROMPT, max_new_tokens=2, num_samples=2)) == 2


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", EMPTY),
        ([], EMPTY),
        ([[]], EMPTY),
        ([257], "prompt id 257 is not in the vocabulary, expected 0..256"),
        ([0, -1], "prompt id -1 is not in the vocabulary, expected 0..256"),
        (b"bytes", f"{NEITHER}b'bytes'"),
        (None, f"{NEITHER}None"),
        (5, f"{NEITHER}5"),
        ([1.5], f"{NEITHER}1.5"),
        ([["a"]], f"{NEITHER}['a']"),
        ({1}, f"{NEITHER}{{1}}"),
        ({1: 2}, f"{NEITHER}{{1: 2}}"),
        (torch.zeros(2, 3), f"prompt 1 of 2: {NEITHER}tensor([0., 0., 0.])"),
        (["a", "", "b"], f"prompt 2 of 3: {EMPTY}"),
        (
            ["a", "b", [257]],
            "prompt 3 of 3: prompt id 257 is not in the vocabulary, expected 0..256",
        ),
        (
            "a" * 512,
            "the prompt has 512 tokens, at most 511 fit in a context of 512; shorten it",
        ),
    ],
)
def test_prompts_that_are_refused(engine, prompt, said):
    assert refusal(engine.generate, prompt) == said
    assert engine.generate(PROMPT, max_new_tokens=1).new_tokens == 1


def test_a_batch_takes_a_list(engine):
    said = f"prompts must be a list of prompts, got '{PROMPT}'"
    assert refusal(engine.batch, PROMPT) == said


def test_arrays_of_one_number_are_prompts_of_their_own(engine):
    expected = [engine.generate([token], max_new_tokens=2).token_ids for token in (5, 7)]
    for prompts in ([torch.tensor([5]), torch.tensor([7])], torch.tensor([[5], [7]])):
        results = engine.generate(prompts, max_new_tokens=2)
        assert [result.token_ids for result in results] == expected
    one = engine.generate(torch.tensor([5, 7]), max_new_tokens=2)
    assert one.token_ids == engine.generate([5, 7], max_new_tokens=2).token_ids


def test_a_stream_takes_one_prompt(engine):
    assert refusal(engine.stream, [PROMPT]) == f"{NEITHER}['{PROMPT}']"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "fast"}, "mode 'fast' is not known, expected lookahead or autoregressive"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be a whole number of at least 1, got 2.0"),
        ({"stop": "end"}, "stop must be a list of non-empty strings, got 'end'"),
        ({"stop": ["end", ""]}, "stop must be a list of non-empty strings, got ['end', '']"),
        ({"stop": [3]}, "stop must be a list of non-empty strings, got [3]"),
    ],
)
def test_requests_that_are_refused(engine, options, said):
    assert refusal(engine.generate, PROMPT, **options) == said
    assert refusal(engine.stream, PROMPT, **options) == said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stop": 5}, "stop must be a list of non-empty strings, got 5"),
        ({"stop": "end"}, "stop must be a list of non-empty strings, got 'end'"),
        ({"lookahead": (5, 4, 5)}, "lookahead must be a LookaheadConfig, got (5, 4, 5)"),
        ({"lookahead": {}}, "lookahead must be a LookaheadConfig, got {}"),
        ({"sampling": 5}, "sampling must be a SamplingConfig, got 5"),
        ({"trace": 3}, "trace must be a callable that takes a step's record, got 3"),
        ({"on_logits": 3}, "on_logits must be a callable that takes logits, got 3"),
    ],
)
def test_arguments_of_another_kind(engine, options, said):
    assert refusal(engine.generate, PROMPT, **options) == said
    assert refusal(engine.stream, PROMPT, **options) == said


@pytest.mark.parametrize("prompts", [None, 3, "abc", {1: 2}, {"a", "b"}])
def test_prompts_that_are_no_list(engine, prompts):
    assert refusal(engine.batch, prompts) == f"prompts must be a list of prompts, got {prompts!r}"


def test_prompts_may_come_one_by_one_and_stop_strings_may_not(engine):
    whole = engine.generate(PROMPT, max_new_tokens=12).text
    batch = engine.batch(iter([PROMPT]), max_new_tokens=12)
    assert [result.text for result in batch.run_to_end()] == [whole]
    for method in (engine.generate, engine.stream, engine.compare):
        said = refusal(method, PROMPT, stop=iter([whole[4:6]]))
        assert said.startswith("stop must be a list of non-empty strings, got <list_iterator")


def test_devices_and_names_of_torch(checkpoint):
    loaded = Engine.load(checkpoint, device=torch.device("cpu"), dtype="float32")
    assert loaded.model.device == torch.device("cpu")
    assert refusal(Engine.load, checkpoint, device=0).startswith("device '0' is not known")
    said = refusal(Engine.load, checkpoint, dtype=torch.float32)
    assert said.startswith("dtype 'torch.float32' is not known")
