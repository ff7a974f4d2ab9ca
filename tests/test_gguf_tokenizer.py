"""The tokenizer: the original's ids, and which keys are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_source import (
    Source,
    imported,
    read_json,
    refusal,
    tiny_source,
    tiny_tokenizer,
    with_key,
    without,
)
from tokenizers import Tokenizer

TEXTS = [
    "In 2023, 12345.67 people didn't  come.\n\n",
    "def f(x):\n\treturn x**2  # 7\n",
    "<|im_start|>user\n你好 👩‍👩‍👧 é<|im_end|> [tool] x",
]


@pytest.fixture
def source() -> Source:
    return tiny_source()


@pytest.fixture
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def test_tokenizer_gives_the_originals_ids(
    source: Source, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    out_dir = imported(source, tmp_path)
    found = Tokenizer.from_file(str(out_dir / "tokenizer.json"))
    assert found.get_vocab() == tokenizer.get_vocab()
    for text in TEXTS:
        expected = tokenizer.encode(text)
        assert found.encode(text).ids == expected.ids
        assert found.encode(text).tokens == expected.tokens
        assert found.decode(expected.ids, skip_special_tokens=False) == text
    assert found.encode("12345").tokens == ["1", "2", "3", "4", "5"]
    assert found.encode("<|im_start|>[tool]").ids == [1, tokenizer.token_to_id("[tool]")]
    added = found.get_added_tokens_decoder()
    special = {token_id: token.special for token_id, token in added.items()}
    assert special == {0: True, 1: True, 2: True, tokenizer.token_to_id("[tool]"): False}


def test_transformers_loads_the_tokenizer(
    source: Source, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(imported(source, tmp_path))
    assert [loaded(text).input_ids for text in TEXTS] == [tokenizer.encode(t).ids for t in TEXTS]
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 2)
    assert loaded.apply_chat_template([{"content": "hi"}], tokenize=False) == "hi\n"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "it's 1234 ok!", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġok", "!"]),
        ("gpt-2", "it's 1234 ok!", ["it", "'s", "Ġ1234", "Ġok", "!"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
        ("default", "it's 1234 a+b!", ["it", "'", "s", "Ġ", "123", "4", "Ġa", "+", "b", "!"]),
        ("llama-bpe", "IT'S 1234 ok!\n\n", ["IT", "'S", "Ġ", "123", "4", "Ġok", "!ĊĊ"]),
    ],
)
def test_pre_tokenizers(
    source: Source, tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    source.keys["tokenizer.ggml.pre"] = pre
    found = Tokenizer.from_file(str(imported(source, tmp_path) / "tokenizer.json"))
    assert [piece for piece, _ in found.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_llama_bpe_takes_whole_words_that_no_merge_makes(
    source: Source, tmp_path: Path, pre: str
) -> None:
    tokens, types = source.keys["tokenizer.ggml.tokens"], source.keys["tokenizer.ggml.token_type"]
    rare = next(i for i, kind in enumerate(types) if kind == 1 and tokens[i] == "Ī")
    source.keys["tokenizer.ggml.tokens"] = [*tokens[:rare], "Ġzq", *tokens[rare + 1 :]]
    source.keys["tokenizer.ggml.pre"] = pre
    found = Tokenizer.from_file(str(imported(source, tmp_path) / "tokenizer.json"))
    assert found.encode(" zq").tokens == (["Ġzq"] if pre == "llama-bpe" else ["Ġ", "z", "q"])


@pytest.mark.parametrize(
    ("pre", "bos", "eos", "expected"),
    [
        ("smollm", None, None, [72]),
        ("smollm", True, None, [1, 72]),
        ("smollm", True, True, [1, 72, 2]),
        ("llama-bpe", None, None, [1, 72]),
        ("llama-bpe", False, None, [72]),
    ],
)
def test_begin_and_end_tokens_are_added_as_the_file_says(
    source: Source,
    tmp_path: Path,
    tokenizer: Tokenizer,
    pre: str,
    bos: bool | None,
    eos: bool | None,
    expected: list[int],
) -> None:
    source.keys["tokenizer.ggml.pre"] = pre
    del source.keys["tokenizer.ggml.add_bos_token"]
    for name, value in (("bos", bos), ("eos", eos)):
        if value is not None:
            source.keys[f"tokenizer.ggml.add_{name}_token"] = value
    out_dir = imported(source, tmp_path)
    found = Tokenizer.from_file(str(out_dir / "tokenizer.json"))
    letter = tokenizer.id_to_token(72)
    assert found.encode(letter).ids == expected
    assert found.encode(letter, add_special_tokens=False).ids == [72]
    config = read_json(out_dir / "tokenizer_config.json")
    assert (config["add_bos_token"], config["add_eos_token"]) == (1 in expected, 2 in expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_key("tokenizer.ggml.model", "llama"), "tokenizer.ggml.model is 'llama'"),
        (with_key("tokenizer.ggml.pre", "qwen2"), "tokenizer.ggml.pre is 'qwen2'"),
        (without("tokenizer.ggml.pre"), "tokenizer.ggml.pre is missing"),
        (with_key("tokenizer.ggml.pre", ["smollm"]), "tokenizer.ggml.pre is ['smollm']"),
        (with_key("tokenizer.ggml.pre", 3), "tokenizer.ggml.pre is 3"),
        (with_key("tokenizer.chat_template", ["a"]), "tokenizer.chat_template is ['a']"),
        (with_key("tokenizer.chat_template", 1), "tokenizer.chat_template is 1"),
        (with_key("tokenizer.ggml.add_bos_token", "no"), "add_bos_token is 'no', expected True or"),
        (with_key("tokenizer.ggml.add_eos_token", 1), "tokenizer.ggml.add_eos_token is 1"),
        (with_key("tokenizer.ggml.add_eos_token", [False]), "add_eos_token is [False]"),
        (without("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens is missing"),
        (without("tokenizer.ggml.merges"), "tokenizer.ggml.merges is missing"),
        (with_key("tokenizer.ggml.merges", ["zz qq"]), "tokenizer.ggml.merges cannot be used"),
        (with_key("tokenizer.ggml.merges", ["alone"]), "tokenizer.ggml.merges cannot be used"),
        (with_key("tokenizer.ggml.token_type", [1, 3]), "tokenizer.ggml.token_type 2"),
        (with_key("tokenizer.ggml.eos_token_id", 99999), "eos_token_id is 99999"),
        (
            lambda made: made.keys["tokenizer.ggml.tokens"].__setitem__(9, "<|im_end|>"),
            "different ones",
        ),
        (
            lambda made: made.keys["tokenizer.ggml.token_type"].__setitem__(9, 6),
            "tokenizer.ggml.token_type 6",
        ),
        (
            lambda made: (
                made.keys.update({"tokenizer.ggml.add_bos_token": True})
                or made.keys.pop("tokenizer.ggml.bos_token_id")
            ),
            "tokenizer.ggml.bos_token_id is missing",
        ),
    ],
)
def test_refusals(
    source: Source, tmp_path: Path, change: Callable[[Source], Any], message: str
) -> None:
    change(source)
    assert message in refusal(source.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("token", ["x:1", "::", "$A", "$B", "$$"])
def test_a_token_that_would_not_be_added_as_written_is_refused(
    source: Source, tmp_path: Path, token: str
) -> None:
    source.keys["tokenizer.ggml.tokens"][1] = token
    imported(source, tmp_path)
    source.keys["tokenizer.ggml.add_bos_token"] = True
    (tmp_path / "again").mkdir()
    message = refusal(source.write(tmp_path / "again" / "model.gguf"))
    assert f"tokenizer.ggml.bos_token_id is the token {token!r}" in message
