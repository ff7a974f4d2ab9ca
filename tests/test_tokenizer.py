"""Ids of texts, and what a checkpoint's files say about them."""

import base64
import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models
from vocabularies import (
    HARD_TEXT,
    SPECIAL,
    copy_llama2_style,
    find_smollm2,
    write_byte_fallback,
    write_byte_level,
    write_json,
    write_sentencepiece,
)

from lookahead.errors import InputError
from lookahead.tokenizer import Tokenizer

TEXTS = [
    HARD_TEXT,
    "",
    " ",
    "Hello",
    " Hello",
    "The quick brown fox",
    "\n",
    "    indented",
    "x" * 300,
    "a\0b",
    "▁",
]


def edit_config(directory: Path, **changes: object) -> Path:
    path = directory / "tokenizer_config.json"
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})
    return directory


@pytest.mark.parametrize("write", [write_byte_level, write_byte_fallback])
def test_tokenizer_json_gives_the_ids_of_transformers(write, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(write(tmp_path))
    ours = Tokenizer.load(tmp_path)
    for text in [*TEXTS, f"{SPECIAL[5]}user\nhi{SPECIAL[6]}\n", "a<s>b</s> <tool> c <s>"]:
        assert ours.encode(text) == theirs.encode(text)
        bare = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == bare
        assert ours.encode(text) == [ours.bos_token_id, *bare]
        assert ours.decode(bare) == theirs.decode(bare, skip_special_tokens=True)


def test_smollm2_gives_the_ids_of_transformers():
    directory = find_smollm2()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    assert ours.vocab_size == 49152
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    messages = [{"role": "user", "content": "Say hi."}]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.render_chat(messages) == text
    assert ours.chat_ids(messages) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("write", [write_sentencepiece, copy_llama2_style])
@pytest.mark.parametrize("legacy", [True, False])
def test_tokenizer_model_gives_the_ids_of_sentencepiece_after_the_beginning_of_text(
    write, legacy, tmp_path
):
    write(tmp_path, legacy=legacy)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = Tokenizer.load(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(text, out_type=int)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("legacy", [True, False])
def test_tokenizer_model_with_special_tokens_gives_the_ids_of_transformers(legacy, tmp_path):
    transformers = pytest.importorskip("transformers")
    from transformers.convert_slow_tokenizer import generate_merges

    copy_llama2_style(tmp_path, legacy=legacy)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    vocabulary = {model.id_to_piece(place): place for place in range(model.get_piece_size())}
    scores = {piece: model.get_score(place) for piece, place in vocabulary.items()}
    theirs = transformers.LlamaTokenizer(
        vocab=vocabulary,
        merges=generate_merges(vocabulary, scores),
        legacy=legacy,
        add_bos_token=True,
    )
    ours = Tokenizer.load(tmp_path)
    # Only where a stretch begins with a space of its own do the two differ: transformers 5 adds
    # none before it, SentencePiece and older transformers do.
    for text in [
        HARD_TEXT,
        "<s>[INST] hi [/INST] yes </s><s>[INST] more [/INST]",
        "a</s>b",
        "x <unk>y\n</s>",
    ]:
        assert ours.encode(text) == theirs.encode(text)


def test_legacy_decides_on_the_space_after_a_special_token(tmp_path):
    text = "<s>[INST] hi [/INST]"
    after_inst = [16289, 28793, 12014, 733, 28748, 16289, 28793]
    copy_llama2_style(tmp_path)
    assert Tokenizer.load(tmp_path).encode(text, False) == [1, 733, *after_inst]  # "▁["
    edit_config(tmp_path, legacy=None)
    assert Tokenizer.load(tmp_path).encode(text, False) == [1, 733, *after_inst]
    edit_config(tmp_path, legacy=False)
    assert Tokenizer.load(tmp_path).encode(text, False) == [1, 28792, *after_inst]  # "["
    assert Tokenizer.load(tmp_path).encode(text[3:], False) == [733, *after_inst]
    edit_config(tmp_path, add_prefix_space=False)
    bare = Tokenizer.load(tmp_path)
    assert bare.encode(text[3:], False) == [28792, *after_inst]
    assert bare.decode([28792, *after_inst]) == text[3:]
    assert bare.decode([12014]) == " hi"


def test_added_tokens_of_a_tokenizer_model(tmp_path):
    write_sentencepiece(
        tmp_path,
        pad_token="<nowhere>",
        added_tokens_decoder={
            "421": {"content": "<|im|>", "special": True},
            "422": {"content": "<|im|>x", "special": False, "lstrip": True, "rstrip": True},
            "425": {"content": "one", "special": True, "single_word": True},
        },
    )
    write_json(tmp_path / "added_tokens.json", {"<shown>": 420, "<hidden>": 423})
    write_json(tmp_path / "special_tokens_map.json", {"additional_special_tokens": ["<hidden>"]})
    tokenizer = Tokenizer.load(tmp_path)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    the = tokenizer.token_to_id("▁the")
    assert tokenizer.vocab_size == 426
    assert tokenizer.token_to_id("<shown>") == 420
    assert tokenizer.token_to_id("<nowhere>") is None
    assert ids("the<shown>the") == [the, 420, the]
    assert ids("the<|im|>the") == [the, 421, the]
    assert ids("the \n <|im|>x \n the<|im|>") == [the, 422, the, 421]
    assert ids("one") == [425]
    assert 425 not in ids("gone")
    assert ids("<unk></s>") == [0, 2]
    assert tokenizer.decode([the, 420, 423, 421, the, 422, 2, 424, 9999]) == "the<shown> the<|im|>x"


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        (write_byte_level, {}),
        (write_byte_fallback, {}),
        (write_sentencepiece, {"legacy": True}),
        (write_sentencepiece, {"legacy": False}),
        (write_sentencepiece, {"add_prefix_space": False}),
        (copy_llama2_style, {"legacy": True}),
    ],
)
@pytest.mark.parametrize(
    "rest", [" </s><s>[INST] What? [/INST]", "\nin 2024", " and", "</s> the dog", ""]
)
def test_what_goes_on_from_a_text_has_the_ids_that_it_has_within_it(
    write, settings, rest, tmp_path
):
    tokenizer = Tokenizer.load(write(tmp_path, **settings))
    text = "The answer is 42."
    ids = [tokenizer.encode(each, add_special_tokens=False) for each in (text, text + rest)]
    assert tokenizer.encode_behind(rest) == ids[1][len(ids[0]) :]


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"add_bos_token": None, "add_eos_token": False}, [1], []),
    ],
)
@pytest.mark.parametrize("write", [write_byte_fallback, write_sentencepiece])
def test_flags_decide_on_beginning_and_end_of_text(write, flags, before, after, tmp_path):
    edit_config(write(tmp_path), tokenizer_class="LlamaTokenizerFast", **flags)
    tokenizer = Tokenizer.load(tmp_path)
    bare = tokenizer.encode("The dog", add_special_tokens=False)
    assert len(bare) > 0
    assert tokenizer.encode("The dog") == [*before, *bare, *after]
    assert tokenizer.encode("") == [*before, *after]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_flags_mean_nothing_to_other_classes_that_have_a_tokenizer_json(tmp_path):
    transformers = pytest.importorskip("transformers")
    edit_config(write_byte_fallback(tmp_path), add_bos_token=False, add_eos_token=True)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = Tokenizer.load(tmp_path).encode("The dog")
    assert ids == theirs.encode("The dog")
    assert ids[0] == 1


def test_names_ids_and_size(tmp_path):
    tokenizer = Tokenizer.load(write_byte_level(tmp_path))
    assert tokenizer.bos_token_id == tokenizer.token_to_id("<|begin_of_text|>") == 0
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|end_of_text|>") == 1
    assert tokenizer.token_to_id("<|nothing|>") is None
    assert tokenizer.token_to_id("¿漢 ") == tokenizer.vocab_size - 1
    edit_config(tmp_path, bos_token={"content": "<|im_start|>", "lstrip": False}, eos_token=None)
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (5, None)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).bos_token_id is None
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": "<|eot_id|>"})
    assert Tokenizer.load(tmp_path).bos_token_id == 4


def test_tokens_named_only_beside_tokenizer_json(tmp_path):
    size = Tokenizer.load(write_byte_level(tmp_path)).vocab_size
    edit_config(
        tmp_path,
        added_tokens_decoder={str(size): {"content": "<|new|>", "special": True, "rstrip": True}},
        additional_special_tokens=["<tool>", "The", "<|nowhere|>"],
    )
    tokenizer = Tokenizer.load(tmp_path)
    tool, the = tokenizer.token_to_id("<tool>"), tokenizer.token_to_id("The")
    ids = tokenizer.encode("<|new|>  a<tool>The", add_special_tokens=False)
    assert ids == [size, tokenizer.token_to_id("a"), tool, the]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.vocab_size == size + 1


def test_naming_a_special_token_keeps_the_way_it_is_matched(tmp_path):
    path = write_byte_fallback(tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["rstrip"] = True
    write_json(path, content)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("</s> \n\n</s>", add_special_tokens=False) == [2, 2]


def test_truncation_and_padding_in_tokenizer_json_do_not_count(tmp_path):
    path = write_byte_level(tmp_path) / "tokenizer.json"
    ids = Tokenizer.load(tmp_path).encode(HARD_TEXT)
    library = LibraryTokenizer.from_file(str(path))
    library.enable_truncation(4)
    library.enable_padding(length=500)
    library.save(str(path))
    assert Tokenizer.load(tmp_path).encode(HARD_TEXT) == ids


def test_half_a_character_in_a_text_is_refused(tmp_path):
    write_sentencepiece(tmp_path)
    with pytest.raises(InputError, match=r"half a character \('\\ud83d'\) at position 2"):
        Tokenizer.load(tmp_path).encode("ab\ud83d")


def test_a_directory_without_tokenizer_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match=r"tokenizer\.json and tokenizer\.model") as caught:
            Tokenizer.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", b"{", "not a tokenizer.json"),
        ("tokenizer.json", b"\xff\xfe\0", "not a tokenizer.json"),
        ("tokenizer.json", b'{"version": "1.0",\n\n"model": {}}', "not a tokenizer.json"),
        ("tokenizer.model", b"not a model", "not a SentencePiece model"),
        ("tokenizer.model", b"", "not a SentencePiece model"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "not a SentencePiece model"),
        ("tokenizer_config.json", b'{\n"a": ', "cannot be read as JSON"),
        ("tokenizer_config.json", b'{"a": "\xff"}', "cannot be read as JSON"),
        ("tokenizer_config.json", b"[1]", "a JSON object, got list"),
        ("tokenizer_config.json", b'{"bos_token": 1}', "bos_token is 1"),
        ("tokenizer_config.json", b'{"legacy": "no"}', 'legacy is "no"'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}', "added_tokens_decoder"),
        ("tokenizer_config.json", b'{"extra_special_tokens": [1]}', "extra_special_tokens holds 1"),
        ("tokenizer_config.json", b'{"extra_special_tokens": 5}', "extra_special_tokens is 5"),
        ("tokenizer_config.json", b'{"extra_special_tokens": 0}', "extra_special_tokens is 0"),
        (
            "tokenizer_config.json",
            b'{"additional_special_tokens": true}',
            "additional_special_tokens is true",
        ),
        (
            "special_tokens_map.json",
            b'{"additional_special_tokens": "abc"}',
            'additional_special_tokens is "abc"; expected a list of text',
        ),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"500": {"content": 5}}}',
            "added_tokens_decoder",
        ),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"500": {"content": "a", "special": "no"}}}',
            "added_tokens_decoder",
        ),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"-5": {"content": "a"}}}',
            "added_tokens_decoder",
        ),
        ("tokenizer_config.json", b'{"added_tokens_decoder": false}', "added_tokens_decoder"),
        ("tokenizer_config.json", rb'{"bos_token": "\ud83d"}', r'bos_token is "\ud83d"'),
        (
            "special_tokens_map.json",
            rb'{"additional_special_tokens": ["\ud83d"]}',
            r'additional_special_tokens holds "\ud83d"',
        ),
        (
            "tokenizer_config.json",
            rb'{"added_tokens_decoder": {"500": {"content": "\ud83d"}}}',
            "added_tokens_decoder",
        ),
        ("added_tokens.json", b'{"<pad>": true}', "id of '<pad>' is True"),
        ("added_tokens.json", b'{"<pad>": -1}', "id of '<pad>' is -1"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is int"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "chat_template"),
        ("special_tokens_map.json", b"x", "cannot be read as JSON"),
        ("added_tokens.json", b'{"<pad>": "1"}', "id of '<pad>' is '1'"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
    ],
)
def test_malformed_files_are_named(name, content, said, tmp_path):
    write_sentencepiece(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        Tokenizer.load(tmp_path)
    message = str(caught.value)
    assert str(tmp_path / name) in message
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    ],
)
def test_a_decoder_that_cannot_be_honoured_is_refused_by_name(decoder, tmp_path):
    path = write_byte_level(tmp_path) / "tokenizer.json"
    library = LibraryTokenizer.from_file(str(path))
    library.decoder = decoder
    library.save(str(path))
    with pytest.raises(InputError, match="has the decoder ") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_without_a_decoder_tokens_are_joined_by_spaces(tmp_path):
    library = LibraryTokenizer(
        models.WordLevel({"one": 0, " two": 1, "<0x41>": 2}, unk_token="one")
    )
    library.save(str(tmp_path / "tokenizer.json"))
    ids = [1, 0, 2, 1]
    assert library.decode(ids) == " two one <0x41>  two"
    assert Tokenizer.load(tmp_path).decode(ids) == library.decode(ids)


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
        {
            "type": "WordPiece",
            "vocab": {"a": 0},
            "unk_token": "<unk>",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None},
        {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<unk>"},
    ],
    ids=lambda model: model["type"],
)
def test_a_text_that_tokenizer_json_has_no_ids_for_is_refused(model, tmp_path):
    write_json(tmp_path / "tokenizer.json", {"version": "1.0", "model": model})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a") == [0]
    for add_special_tokens in (True, False):
        with pytest.raises(InputError, match="cannot turn the text 'zq' into ids") as caught:
            tokenizer.encode("zq", add_special_tokens)
        assert str(tmp_path / "tokenizer.json") in str(caught.value)
        assert "\n" not in str(caught.value)


def precompiled(charsmap: bytes) -> dict[str, object]:
    text = base64.b64encode(charsmap).decode()
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}}


UNDECLARED = {
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
}


@pytest.mark.parametrize(
    "part",
    [UNDECLARED, precompiled(b"x"), precompiled(b"\4\0\0\0abcd")],
    ids=["undeclared token", "charsmap that is none", "charsmap that leads nowhere"],
)
def test_a_tokenizer_json_that_makes_the_library_panic_is_refused(part, tmp_path):
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    write_json(tmp_path / "tokenizer.json", {"version": "1.0", "model": model, **part})
    with pytest.raises(InputError) as caught:
        Tokenizer.load(tmp_path).encode("a é")
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_taken_for_a_panic(stop, tmp_path, monkeypatch):
    class Library:
        @staticmethod
        def from_file(path: str) -> None:
            raise stop

    monkeypatch.setattr("lookahead.vocabulary_json.tokenizers.Tokenizer", Library)
    with pytest.raises(stop):
        Tokenizer.load(write_byte_level(tmp_path))
