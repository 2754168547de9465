"""Fields of requests that clients send beside this server's own: other names of these, and fields without effect.

One rule for every API: a field with a meaning here is used under its published name; one that cannot change an answer
here is accepted and ignored; one that would change it is refused by its name, unless its value turns it off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

RENAMED = {  # a peer's name -> ours. llama-server's, then SGLang's
    "n_predict": "max_tokens",
    "n_cmpl": "n",
    "repeat_penalty": "repetition_penalty",
    "json_schema": "guided_json",
    "grammar": "guided_grammar",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
    "no_stop_trim": "include_stop_str_in_output",
}
OF_ACCOUNTS = (  # OpenAI's: accounts, caches and services of theirs
    *("user", "metadata", "store", "service_tier", "safety_identifier", "moderation", "verbosity", "prediction"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
WITHOUT_EFFECT = (
    *OF_ACCOUNTS,
    # vLLM's: names for its logs and routers, forms of inputs and outputs that do not exist here
    *("request_id", "session_id", "vllm_xargs", "stream_interval", "spaces_between_special_tokens", "media_io_kwargs"),
    *("mm_processor_kwargs", "return_mm_kwargs", "return_token_offsets", "routed_experts_prompt_start"),
    "guided_decoding_backend",
    # SGLang's: the same
    *("rid", "extra_key", "custom_labels", "custom_params", "session_params", "images_config", "routed_dp_rank"),
    *("data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
    *("routed_experts_start_len", "return_cached_tokens_details", "ngram_corpus_id"),
    # llama-server's: its cache, its drafts, its logs; and settings of samplers that are refused unless they are off
    *("cache_prompt", "id_slot", "n_keep", "n_discard", "n_indent", "n_cache_reuse", "timings_per_token", "min_keep"),
    *("return_progress", "return_tokens", "response_fields", "backend_sampling", "post_sampling_probs", "samplers"),
    *("repeat_last_n", "mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "adaptive_decay"),
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "preserved_tokens"),
    *("grammar_triggers", "parse_tool_calls", "reasoning_format", "reasoning_in_content", "chat_format"),
    *("speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type", "speculative.ngram_size_n"),
    *("speculative.ngram_size_m", "speculative.ngram_m_hits"),
)
REFUSED = {  # a field -> what to do instead
    "audio": "audio is not supported; the models write text only",
    "web_search_options": "web search is not supported; give the model a function that searches",
    "chat_template": "a request cannot bring a template; the server's option --chat-template can",
    "cache_salt": "the cache is one for all requests, and equal beginnings share their pages",
    "prompt_embeds": "vectors are not supported; give a text or token ids",
    "logits_processors": "a request cannot bring code; use logit_bias, bad_words or allowed_token_ids",
    "custom_logit_processor": "a request cannot bring code; use logit_bias, bad_words or allowed_token_ids",
    "logprob_token_ids": "is not supported; use logprobs, or a request for each text with echo",
    "repetition_detection": "is not supported; use repetition_penalty, or stop",
    "stop_regex": "is not supported; use stop, or guided_regex",
    "guided_whitespace_pattern": "is not supported; write the white space into guided_regex or guided_grammar",
    "watermarking": "is not supported",
    "kv_transfer_params": "caches are not transferred",
    "ec_transfer_params": "caches are not transferred",
    "lora_path": "name an adapter of `serve --lora` in model, as MODEL:ADAPTER",
    "lora": "name an adapter of `serve --lora` in model, as MODEL:ADAPTER",
    "return_hidden_states": "is not supported; use /v1/embeddings",
    "return_routed_experts": "is not supported",
    "return_prompt_text": "is not supported; /apply-template gives the text",
    "grammar_lazy": "is not supported; a grammar holds from the first token of the answer",
    "mirostat": "this sampler is not supported; use temperature, top_p, min_p or typical_p",
    "xtc_probability": "this sampler is not supported; use temperature, top_p, min_p or typical_p",
    "dry_multiplier": "this sampler is not supported; use repetition_penalty or frequency_penalty",
    "dynatemp_range": "this sampler is not supported; use temperature",
    "top_n_sigma": "this sampler is not supported; use temperature, top_p, min_p or typical_p",
    "adaptive_target": "this sampler is not supported; use temperature, top_p, min_p or typical_p",
    "t_max_predict_ms": "is not supported; use max_tokens, or the server's option --request-timeout-s",
}


OFF: list[Any] = [None, False, 0, -1, "", [], {}]


IGNORED = "Accepted, and changes nothing."


def ignored(names: Iterable[str]) -> dict[str, Any]:
    """JSON schemas of fields without effect."""
    return {name: {"description": IGNORED} for name in names}


def refused(reasons: Mapping[str, str]) -> dict[str, Any]:
    """JSON schemas of fields that may only have a value that turns them off; `schemas.check` gives the reason."""
    return {name: {"enum": OFF, "description": why} for name, why in reasons.items()}


def is_unused(schema: Mapping[str, Any]) -> bool:
    """Whether a field with this schema is ignored or refused."""
    return schema.get("description") == IGNORED or schema.get("enum") == OFF


def rename_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null, under our names. Empty guides and numbers below 0 mean none in a peer's field."""
    given = {name: value for name, value in body.items() if value is not None and name not in RENAMED}
    for name, ours in RENAMED.items():
        value = body.get(name)
        if value is not None and value != "" and not (name == "n_predict" and value < 0):
            given[ours] = value
    return given
