"""What imports what: the layers of the package, and what it never loads."""

import ast
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lookahead"

# A file imports only from rows above its own. Each file is in the first row that names it.
ROWS = [
    "errors",
    "json_file whole_file",
    "config layout",
    "detokenizer chat_template",
    "vocabulary",
    "vocabulary_json vocabulary_sentencepiece",
    "tokenizer",
    "prompt_ids prompt_file",
    "interrupts",
    "command_line sampling_options",
    "devices",
    "kernels.checks kernels.philox kernels.row_blocks kernels.sequences kernels.warpers",
    "kernels.simd_types",
    "kernels.simd",
    "kernels.simd_exp kernels.team kernels.tile",
    "kernels.product_numba kernels.largest_logit_numba",
    "kernels.draw_scores_triton",
    "kernels.draw_kept_triton kernels.draw_kept_numba",
    "kernels.tuning kernels.*_ref kernels.*_triton kernels.*_numba",
    "kernels.*_launch",
    "kernels.attn_mask kernels.commit_rows kernels.draw kernels.largest_logit kernels.rms_norm "
    "kernels.rope_write kernels.silu_mul",
    "kernels.*",
    "kv_cache",
    "drafting.*_triton",
    "drafting.ngram_pool drafting.ngram_pool_triton drafting.window",
    "drafting.*",
    "verify step_output",
    "models.checkpoint_keys",
    "models.checkpoint_config models.rope models.weights",
    "models.products",
    "models.forward_*",
    "models.row_buffers models.row_trial",
    "models.llama_numba",
    "models.llama models.loader",
    "load prefill",
    "parallel",
    "decode_state layout_tensors",
    "sampling",
    "step_ref step_numbers step_draft_numba row_budget",
    "step_work step_settle_numba step_triton",
    "step_numba",
    "step",
    "step_costs",
    "step_graph step_runner",
    "step_source",
    "tune",
    "results stops request",
    "answer logprobs",
    "batch",
    "stream request_options",
    "compare conversation display session stats",
    "engine",
    "gguf_file",
    "gguf_config gguf_tokenizer gguf_weights",
    "import_gguf",
    "engine_options chat_stats",
    "generate chat",
]
# The packages' own files: importing any file of a package runs them.
EXEMPT = {"", "drafting", "kernels", "models"}
# What needs no tensors imports no torch, not even through another file.
WITHOUT_TORCH = """
    errors json_file config layout detokenizer chat_template vocabulary vocabulary_json
    vocabulary_sentencepiece tokenizer models.checkpoint_config results stops row_budget request
    prompt_file interrupts gguf_file gguf_config gguf_tokenizer gguf_weights import_gguf
""".split()


def module_name(path: Path) -> str:
    """Name within the package: "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


IMPORTS = {
    module_name(path): frozenset(
        name
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in statement.names]
            if isinstance(statement, ast.Import)
            else [f"{'.' * statement.level}{statement.module or ''}"]
            if isinstance(statement, ast.ImportFrom)
            else []
        )
    )
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports_within(module: str) -> set[str]:
    """Files of the package that a file imports, by their name within it."""
    prefix = f"{PACKAGE.name}."
    return {name.removeprefix(prefix) for name in IMPORTS[module] if name.startswith(prefix)}


def row_of(module: str) -> int:
    rows = [
        number
        for number, patterns in enumerate(ROWS)
        if any(fnmatchcase(module, pattern) for pattern in patterns.split())
    ]
    assert rows, f"{module} is in no row: add it to the table"
    return rows[0]


def everything_imported(module: str, seen: set[str] | None = None) -> set[str]:
    """All that a file imports, directly or through files of the package."""
    seen = set() if seen is None else seen
    for name in IMPORTS[module] - seen:
        seen.add(name)
        inner = name.removeprefix(f"{PACKAGE.name}.")
        if inner in IMPORTS:
            everything_imported(inner, seen)
    return seen


@pytest.mark.parametrize("module", sorted(set(IMPORTS) - EXEMPT))
def test_a_file_imports_only_from_rows_above(module):
    unclear = [name for name in IMPORTS[module] if name.startswith(".") or name == PACKAGE.name]
    assert not unclear, "imports name the file: from lookahead.config import ..."
    for imported in imports_within(module):
        assert imported in IMPORTS, f"{module} imports {imported}, which is no file"
        assert row_of(imported) < row_of(module), f"{module} imports {imported} from below"


def test_packages_load_nothing_of_their_own():
    for package in EXEMPT - {""}:
        assert IMPORTS[package] == set(), package
    interface = {"config", "engine", "errors", "results"}
    assert imports_within("") == interface


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_needs_no_tensors_imports_no_torch(module):
    roots = {name.split(".")[0] for name in everything_imported(module)}
    assert "torch" not in roots


def test_the_check_for_torch_can_find_it():
    assert "torch" in everything_imported("engine")
    assert "torch" in everything_imported("kernels.attn_mask")
    assert "torch" in everything_imported("generate"), "found through another file"


def test_who_may_import_what_is_optional():
    for module, names in IMPORTS.items():
        roots = {name.split(".")[0] for name in names}
        assert "transformers" not in roots, module
        assert "triton" not in roots or module.endswith("_triton"), module
        assert "gguf" not in roots or module.startswith("gguf_") or module == "import_gguf"


@pytest.mark.parametrize("module", ["lookahead", "lookahead.generate", "lookahead.import_gguf"])
def test_importing_loads_nothing_that_is_not_needed(module):
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert module in loaded
    assert loaded.isdisjoint({"transformers", "gguf", "matplotlib"})


def test_the_interface():
    import lookahead

    names = ["Chunk", "Engine", "InputError", "LookaheadConfig", "Result", "SamplingConfig"]
    assert sorted(lookahead.__all__) == names
    assert all(hasattr(lookahead, name) for name in names)
