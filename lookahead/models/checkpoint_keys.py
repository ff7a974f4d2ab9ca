"""Keys of a checkpoint's `config.json` and `generation_config.json` that are not settings of the model.

Knows which of them never matter and which must hold a neutral value; what the others mean, and how
they are read, is `checkpoint_config.py`'s business.
"""

from collections.abc import Mapping
from typing import Any

# Keys of either file that change nothing about greedy inference, whatever their value. Sampling
# settings are among them: a checkpoint only suggests those, and the caller's own settings rule.
INERT_KEYS = frozenset(
    """
    _attn_implementation_autoset _from_model_config _name_or_path architectures
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind attention_dropout
    bos_token_id cache_config chunk_size_feed_forward compile_config continuous_batching_config
    disable_compile do_sample dtype early_stopping eos_token_id epsilon_cutoff eta_cutoff
    finetuning_task id2label initializer_range is_assistant is_decoder is_llama_config label2id
    length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens
    max_sequence_length max_time min_p model_type num_assistant_tokens num_assistant_tokens_schedule
    num_beam_groups num_return_sequences output_attentions output_hidden_states output_logits
    output_scores pad_token_id prefill_chunk_size prefix pretraining_tp problem_type
    prompt_lookup_num_tokens remove_invalid_values renormalize_logits return_dict
    return_dict_in_generate return_legacy_cache sep_token_id speculation_type target_lookbehind
    task_specific_params temperature tf_legacy_loss tokenizer_class top_h top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version
    use_bfloat16 use_cache use_mtp
    """.split()
)

# Keys of either file that would change the result unless they hold one of these values.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (None, False),
    "assistant_ensemble_weight": (None,),
    "attention_multiplier": (None, 1.0),
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    # Among the others is "quantized", which rounds keys and values.
    "cache_implementation": (None, "dynamic", "static"),
    "constraints": (None,),
    "cross_attention_hidden_size": (None,),
    "decoder_start_token_id": (None,),
    "diversity_penalty": (None, 0.0),
    "dola_layers": (None,),
    "embedding_multiplier": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_decoder_ids": (None, []),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1.0),
    "is_encoder_decoder": (None, False),
    "layer_types": (None,),
    "logits_scaling": (None, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "no_rope_layers": (None,),
    "num_beams": (None, 1),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1.0),
    "penalty_alpha": (None, 0.0),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "repetition_penalty": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "rope_interleaved": (None, False),
    "sequence_bias": (None,),
    "sliding_window": (None,),
    "stop_strings": (None, []),
    "suppress_tokens": (None, []),
    "tie_encoder_decoder": (None, False),
    "token_healing": (None, False),  # it replaces the end of the prompt
    "use_sliding_window": (None, False),
    "watermarking_config": (None,),
}
