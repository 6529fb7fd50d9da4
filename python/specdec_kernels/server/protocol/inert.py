"""Fields that are accepted with the values that ask for nothing, and refused with others.

They are fields of OpenAI's published schema and of vLLM's and SGLang's extensions that the server does not offer. A
client that always sends its defaults is served; one that asks for more gets an error that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Inert = Mapping[str, Sequence[Any]]

OF_TEXT: Inert = {
    # OpenAI
    "audio": (),
    "moderation": (),
    "suffix": ("",),
    "web_search_options": (),
    # vLLM
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "detokenize": (True,),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_mm_kwargs": (True,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_labels": ({},),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "disagg_prefill_dp_rank": (),
    "extra_key": (),
    "images_config": ({},),
    "lora_path": (),
    "ngram_corpus_id": (),
    "no_stop_trim": (False,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_dp_rank": (),
    "routed_experts_start_len": (0,),
    "session_params": ({},),
    "stop_regex": ([], ""),
}
OF_CHAT: Inert = {
    **OF_TEXT,
    "add_special_tokens": (False,),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "input_ids": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "modalities": (["text"],),
    "return_meta_info": (False, True),  # every response has it
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "stream_reasoning": (True,),
    "task": (),
    "use_audio_in_video": (False,),
    "verbosity": ("medium",),
}


def asks_for_nothing(inert: Inert, name: str, value: Any) -> bool:
    """Return whether a field is without effect by its value; true is not 1 here."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in inert.get(name, ()))
