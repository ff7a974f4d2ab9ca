"""The keys of a GGUF file that describe its tokenizer, as `tokenizer.json` and its settings.

Knows the byte-level BPE that GGUF calls gpt2 and how llama.cpp splits text for it. What would give
other ids is carried over or refused by name.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from lookahead.errors import InputError
from lookahead.gguf_file import read_list, shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # GGUF's token types

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's own split for files that name none better. It is not GPT-2's.
DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")


def read_special_ids(metadata: dict[str, Any], vocab_size: int) -> dict[str, int]:
    """The ids of those of bos, eos, eot, eom, unk and pad that the file names."""
    gguf_names = {"unk": "unknown", "pad": "padding"}
    ids = {}
    for name in ("bos", "eos", "eot", "eom", "unk", "pad"):
        key = f"tokenizer.ggml.{gguf_names.get(name, name)}_token_id"
        if key not in metadata:
            continue
        if type(metadata[key]) is not int or not 0 <= metadata[key] < vocab_size:
            raise InputError(f"{key} is {shown(metadata[key])}, expected an id below {vocab_size}")
        ids[name] = metadata[key]
    return ids


def read_tokenizer_config(metadata: dict[str, Any], special_ids: dict[str, int]) -> dict[str, Any]:
    """What tokenizer_config.json says."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(metadata, "bos", special_ids),
        "add_eos_token": _adds(metadata, "eos", special_ids),
    }
    for name in ("bos", "eos", "unk", "pad"):
        if name in special_ids:
            config[f"{name}_token"] = tokens[special_ids[name]]
    if "tokenizer.chat_template" in metadata:
        template = metadata["tokenizer.chat_template"]
        if not isinstance(template, str):
            raise InputError(f"tokenizer.chat_template is {shown(template)}, expected text")
        config["chat_template"] = template
    return config


def read_tokenizer(metadata: dict[str, Any], special_ids: dict[str, int]) -> Tokenizer:
    """The tokenizer, to be saved as tokenizer.json."""
    tokens = read_list(metadata, "tokenizer.ggml.tokens", str)
    kinds = read_list(metadata, "tokenizer.ggml.token_type", int)
    merges = read_list(metadata, "tokenizer.ggml.merges", str)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens) or len(kinds) != len(tokens):
        raise InputError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, {len(ids)} different ones, and "
            f"tokenizer.ggml.token_type {len(kinds)}; expected three equal numbers"
        )
    pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    ignore_merges = metadata["tokenizer.ggml.pre"] == "llama-bpe"
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises nothing more precise
        raise InputError(f"tokenizer.ggml.merges cannot be used: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(tokens, kinds))
    begin, end = (
        [tokens[special_ids[name]]] if _adds(metadata, name, special_ids) else []
        for name in ("bos", "eos")
    )
    if begin or end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            special_tokens=[(token, ids[token]) for token in {*begin, *end}],
        )
    return tokenizer


def _adds(metadata: dict[str, Any], name: str, special_ids: dict[str, int]) -> bool:
    """Whether every text begins (bos) or ends (eos) with the token of that name."""
    # llama.cpp adds bos to Llama 3 text unless a file says that it should not.
    usual = name == "bos" and metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    key = f"tokenizer.ggml.add_{name}_token"
    adds = metadata.get(key, usual)
    if not isinstance(adds, bool):
        raise InputError(f"{key} is {shown(adds)}, expected True or False")
    if adds and name not in special_ids:
        raise InputError(f"tokenizer.ggml.{name}_token_id is missing, and texts are to have it")
    token = metadata["tokenizer.ggml.tokens"][special_ids[name]] if adds else ""
    if token.startswith("$") or ":" in token:  # these mean something else in a template
        raise InputError(
            f"tokenizer.ggml.{name}_token_id is the token {shown(token)}, which cannot be added to "
            "texts; expected one without a colon that does not begin with $"
        )
    return adds


def _pre_tokenizer(name: Any) -> pre_tokenizers.PreTokenizer:
    def splits(*expressions: str) -> list[pre_tokenizers.PreTokenizer]:
        return [pre_tokenizers.Split(Regex(text), "isolated") for text in expressions]

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known: dict[str, list[pre_tokenizers.PreTokenizer]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), gpt2],
        "gpt-2": [gpt2],
        "default": [*splits(*DEFAULT_SPLITS), to_bytes],
        "llama-bpe": [*splits(LLAMA3_SPLIT), to_bytes],
    }
    if not isinstance(name, str) or name not in known:
        raise InputError(f"tokenizer.ggml.pre is {shown(name)}, expected one of {', '.join(known)}")
    return pre_tokenizers.Sequence(known[name])


def _added_tokens(tokens: list[str], kinds: list[int]) -> list[AddedToken]:
    """The tokens that are found in a text as a whole, before anything splits it."""
    added = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED):
            raise InputError(f"tokenizer.ggml.token_type {kind} of {token!r} is not supported")
        if kind not in (NORMAL, UNUSED):
            added.append(AddedToken(token, special=kind != USER_DEFINED, normalized=False))
    return added
