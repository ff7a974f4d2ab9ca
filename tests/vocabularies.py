"""Checkpoint directories with one small vocabulary of each kind, trained on a few lines of text.

Also finds the real vocabularies that happen to be installed, and says why one is not there.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2))",
    "In 2024 there were 1234567 of them; 3.14159 and 2.71828 were not among them.",
    "naïve café, über, 漢字 and かな, Привет мир",
    "[INST] What is the answer? [/INST] The answer is 42.",
] * 20

HARD_TEXT = (
    "for (int i = 0; i < 10; i++) {\n\t\treturn x[i]  !=  NULL;\n}\n\n\n"
    "👩‍👩‍👧‍👦 🇩🇪🇯🇵 👍🏽 漢字かな 한국어 e\u0301 naïve \U00010348 "
    "1234567 3.14159 100,000            end of long white space   \n \t x\u200bé"
)
SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
]


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def write_byte_level(directory: Path) -> Path:
    """tokenizer.json as Llama-3 has it: byte-level BPE, beginning-of-text by the post-processor."""
    tokenizer = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    # Added tokens that are shown, one of them not written in the byte alphabet.
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("¿漢 ", normalized=False)])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
            ),
        ]
    )
    return _save(tokenizer, directory, bos_token=SPECIAL[0], eos_token=SPECIAL[1])


def write_byte_fallback(directory: Path) -> Path:
    """tokenizer.json as Llama-2 has it: BPE over characters, with tokens for single bytes."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += sorted(model["vocab"], key=model["vocab"].get)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: place for place, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _save(tokenizer, directory, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_sentencepiece(directory: Path, **config: object) -> Path:
    """tokenizer.model as Llama-2 has it, with whatever `config` tokenizer_config.json is to say."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(directory / "tokenizer"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        split_digits=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (directory / "tokenizer.vocab").unlink()
    write_json(directory / "tokenizer_config.json", config)
    return directory


def copy_llama2_style(directory: Path, **config: object) -> Path:
    """A real 32,000-piece tokenizer.model, from the data files of the package mistral-common."""
    found = importlib.util.find_spec("mistral_common")
    if found is None or found.origin is None:
        pytest.skip(
            "mistral-common is not installed (pip install --no-deps mistral-common==1.13.1)"
        )
    source = Path(found.origin).parent / "data" / "tokenizer.model.v1"
    if not source.is_file():
        pytest.skip(f"this release of mistral-common has no {source.name}")
    shutil.copyfile(source, directory / "tokenizer.model")
    write_json(directory / "tokenizer_config.json", config)
    return directory


def find_smollm2() -> Path:
    """The demo's checkpoint."""
    directory = Path(__file__).parent.parent / "checkpoints" / "smollm2-135m-instruct"
    if not (directory / "tokenizer.json").is_file():
        pytest.skip("checkpoints/smollm2-135m-instruct has no tokenizer.json (`make demo` gets it)")
    return directory


def _save(tokenizer: Tokenizer, directory: Path, **special_tokens: str) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **special_tokens,
        },
    )
    return directory
