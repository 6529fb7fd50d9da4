"""Request bodies: every published field is accepted or refused by its value, and clients' defaults are accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from specdec_kernels.engine import SamplingParams
from specdec_kernels.server.protocol.bodies import ChatBody, CompletionBody, StreamOptions
from support.request_engines import make_engine
from support.server_thread import NAME, Running, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
AREA = {"type": "function", "function": {"name": "area", "parameters": {}}}
SIDE = {"type": "function", "function": {"name": "side", "parameters": {}}}
TEXT = "def area("
# Renders roles, so that tests see them, and the variables that ask for thoughts.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(make_engine("none", max_len=256, grammars=True), chat_template=TEMPLATE) as running:
        yield running


def conversation(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, **fields}


def prompt(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": TEXT, "max_tokens": 2, **fields}


def rendered(server: Running, template: str | None = None, **fields: Any) -> str:
    """Return the prompt that the server makes of a conversation."""
    status, _, answer = server.ask("/tokenize", {"messages": [{"role": "user", "content": "a"}], **fields})
    assert status == 200, answer
    text: str = server.engine.tokenizer.decode(json.loads(answer)["tokens"])
    return text


# --- fields of the published schemas

# Request fields of vLLM and SGLang beyond OpenAI's, in the versions that this server was compared with.
OF_BOTH = (
    # vLLM 0.33
    *(
        "thinking_token_budget",
        "use_beam_search",
        "top_k",
        "min_p",
        "repetition_penalty",
        "watermarking",
        "length_penalty",
    ),
    *(
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "prompt_logprobs",
    ),
    *("spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side", "logprob_token_ids", "bad_words"),
    *("allowed_token_ids", "add_special_tokens", "response_format", "structured_outputs", "priority", "request_id"),
    *("session_id", "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start", "cache_salt"),
    *("return_token_offsets", "return_mm_kwargs", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
    *("repetition_detection", "stream_interval", "prompt_embeds"),
    # SGLang 0.5.23
    *("return_hidden_states", "return_routed_experts", "routed_experts_start_len", "return_cached_tokens_details"),
    *("regex", "ebnf", "json_schema", "stop_regex", "no_stop_trim", "lora_path", "session_params", "custom_params"),
    *(
        "custom_logit_processor",
        "images_config",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "routed_dp_rank",
    ),
    *("disagg_prefill_dp_rank", "data_parallel_rank", "rid", "extra_key", "ngram_corpus_id", "custom_labels"),
)
OF_CHATS = (
    *("include_reasoning", "echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template"),
    *(
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "return_prompt_text",
        "return_prompt_token_ids",
    ),
    *("return_meta_info", "task", "separate_reasoning", "stream_reasoning", "max_dynamic_patch", "min_dynamic_patch"),
    *("use_audio_in_video", "input_ids"),
)


def published(params: Any) -> set[str]:
    return {*get_type_hints(params.CompletionCreateParamsStreaming), *get_type_hints(params.CompletionCreateParamsBase)}


@pytest.mark.parametrize(
    ("body", "params"), [(ChatBody, chat_create_params), (CompletionBody, completion_create_params)]
)
def test_every_published_field_is_known(body: Any, params: Any) -> None:
    known = {*body.model_fields, *body.inert}
    assert published(params) - known == set()
    assert not body.model_fields.keys() & body.inert.keys()


@pytest.mark.parametrize(("body", "names"), [(ChatBody, (*OF_BOTH, *OF_CHATS)), (CompletionBody, OF_BOTH)])
def test_every_field_of_vllm_and_sglang_is_known(body: Any, names: tuple[str, ...]) -> None:
    assert {*names} - {*body.model_fields, *body.inert} == set()


def test_every_published_stream_option_is_known() -> None:
    known = {*StreamOptions.model_fields, *StreamOptions.inert}
    assert get_type_hints(chat.ChatCompletionStreamOptionsParam).keys() <= known


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {
            "audio": None, "modalities": ["text"], "moderation": None, "web_search_options": None, "verbosity": "medium",
            "store": True, "metadata": {"a": "b"}, "user": "me", "service_tier": "priority", "safety_identifier": "x",
            "prompt_cache_key": "k", "prompt_cache_retention": "in_memory", "prompt_cache_options": {"mode": "implicit"},
            "reasoning_effort": "medium", "functions": [], "function_call": "auto", "tools": [], "tool_choice": "none",
            "parallel_tool_calls": False, "logit_bias": {}, "stop": None, "n": 1, "seed": 0, "prediction": None,
            "stream_options": {"include_obfuscation": False},
        }),
        (COMPLETIONS, {
            "best_of": 1, "echo": False, "suffix": None, "logprobs": None, "user": "me", "stop": [], "logit_bias": None,
        }),
    ],
    ids=["chat", "completion"],
)  # fmt: skip
def test_published_fields_that_ask_for_nothing_are_accepted(server: Running, path: str, fields: dict[str, Any]) -> None:
    body = conversation(**fields) if path == CHAT else prompt(**fields)
    assert server.ask(path, body)[0] == 200


VLLM: dict[str, Any] = {
    "use_beam_search": False, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "watermarking": False,
    "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False,
    "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None,
    "bad_words": [], "logits_processors": [], "vllm_xargs": {}, "kv_transfer_params": None, "priority": 0,
    "return_token_ids": False, "return_tokens_as_token_ids": False, "session_id": "a", "thinking_token_budget": -1,
    "guided_decoding_backend": "xgrammar", "structured_outputs": None,
}  # fmt: skip
SGLANG: dict[str, Any] = {
    "top_k": -1, "no_stop_trim": False, "stop_regex": None, "lora_path": None, "return_hidden_states": False,
    "return_routed_experts": False, "custom_params": {}, "custom_logit_processor": None, "data_parallel_rank": None,
    "session_params": {}, "skip_special_tokens": True, "regex": None, "ebnf": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, VLLM | {"echo": False, "add_generation_prompt": True, "continue_final_message": False,
                       "add_special_tokens": False, "documents": [], "chat_template": None, "mm_processor_kwargs": {}}),
        (COMPLETIONS, VLLM | {"add_special_tokens": True, "prompt_embeds": None}),
        (CHAT, SGLANG | {"continue_final_message": False, "return_meta_info": True, "use_audio_in_video": False}),
        (COMPLETIONS, SGLANG | {"json_schema": None}),
    ],
    ids=["vllm chat", "vllm completion", "sglang chat", "sglang completion"],
)  # fmt: skip
def test_defaults_of_other_servers_are_accepted(server: Running, path: str, fields: dict[str, Any]) -> None:
    body = conversation(**fields) if path == CHAT else prompt(**fields)
    assert server.ask(path, body)[0] == 200


@pytest.mark.parametrize(
    ("path", "field", "value", "expected"),
    [
        (CHAT, "audio", {"voice": "ash", "format": "wav"}, None),
        (CHAT, "modalities", ["text", "audio"], None),
        (CHAT, "web_search_options", {}, None),
        (CHAT, "moderation", {"model": "omni-moderation-latest"}, None),
        (CHAT, "verbosity", "low", None),
        (CHAT, "functions", [{"name": "f"}], None),
        (CHAT, "store", 1, "true or false"),
        (CHAT, "metadata", "a", "an object"),
        (CHAT, "user", 5, "a string"),
        (CHAT, "service_tier", 1, "a string"),
        (CHAT, "reasoning_effort", "huge", "one of none, minimal, low, medium, high, xhigh, max"),
        (CHAT, "reasoning_effort", "high", 'none or "none" (the chat template does not read it)'),
        (CHAT, "use_beam_search", True, None),
        (CHAT, "skip_special_tokens", False, None),
        (CHAT, "length_penalty", True, None),
        (CHAT, "include_stop_str_in_output", True, None),
        (CHAT, "cache_salt", "a", None),
        (CHAT, "lora_path", "a", None),
        (CHAT, "guided_choice", [], "a list of strings"),
        (CHAT, "guided_json", "{", "a JSON schema"),
        (COMPLETIONS, "best_of", 3, "none, 1 or n"),
        (COMPLETIONS, "suffix", "end", None),
        (COMPLETIONS, "messages", [], None),
        (COMPLETIONS, "temprature", 1, None),
    ],
)  # fmt: skip
def test_fields_that_ask_for_more_are_refused_by_value(
    server: Running, path: str, field: str, value: Any, expected: str | None
) -> None:
    body = conversation(**{field: value}) if path == CHAT else prompt(**{field: value})
    shown = json.dumps(value)
    words = expected or "none (this field is not supported)"
    assert server.error(path, body) == (400, f"{field} is {shown}, expected {words}", field)


@pytest.mark.parametrize("name", ["request_id", "rid"])
def test_response_has_the_id_of_its_request(server: Running, name: str) -> None:
    for path, body, prefix in ((CHAT, conversation(), "chatcmpl-"), (COMPLETIONS, prompt(), "cmpl-")):
        _, _, answer = server.ask(path, body | {name: "abc"})
        assert json.loads(answer)["id"] == f"{prefix}abc"
        message = f'{name} is "", expected a string of 1 to 256 characters'
        assert server.error(path, body | {name: ""}) == (400, message, name)


# --- messages


def test_developer_messages_are_system_messages_to_templates_without_that_role(server: Running) -> None:
    messages = [{"role": "developer", "content": "b"}, {"role": "user", "content": "a"}]
    assert rendered(server, messages=messages) == "system: b\nuser: a\nassistant:"
    status, _, _ = server.ask(CHAT, conversation(messages=messages))
    assert status == 200


def test_every_form_of_text_content_is_accepted(server: Running) -> None:
    part = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    call = {"id": "1", "type": "function", "function": {"name": "area", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [part], "name": "me"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "d"}]},
        {"role": "assistant", "content": None, "refusal": "e"},
        {"role": "assistant", "content": None, "tool_calls": [call], "audio": None, "function_call": None},
        {"role": "tool", "tool_call_id": "1", "content": [part, part]},
    ]
    want = "system: b\nuser: c\nassistant: d\nassistant: e\nassistant: \ntool: b\nb\nassistant:"
    assert rendered(server, messages=messages) == want


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
         'messages[0].content[0] is {"type": "input_audio", "input_audio": {}}, expected {"type": "text", "text": ...}'),
        ({"role": "assistant", "audio": {"id": "a"}},
         'messages[0].audio is {"id": "a"}, expected none (this field is not supported)'),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
         'messages[0].function_call is {"name": "f", "arguments": ""}, expected none (this field is not supported)'),
    ],
)  # fmt: skip
def test_content_that_is_no_text_is_refused(server: Running, message: dict[str, Any], error: str) -> None:
    assert server.error(CHAT, conversation(messages=[message])) == (400, error, "messages")


def test_final_message_is_continued(server: Running) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}]
    text = rendered(server, messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "user: a\nassistant: so"
    assert rendered(server, add_generation_prompt=False) == "user: a\n"


# --- tools and thoughts


@pytest.mark.parametrize(("mode", "tools"), [("auto", 1), ("required", 1)])
def test_allowed_tools_are_the_only_ones(server: Running, mode: str, tools: int) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [SIDE]}}
    assert f"{tools} tools" in rendered(server, tools=[AREA, SIDE], tool_choice=choice)
    unknown = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [SIDE]}}
    status, message, param = server.error(CHAT, conversation(tools=[AREA], tool_choice=unknown))
    assert (status, param) == (400, "tool_choice") and message.endswith('expected one of tools, which are ["area"]')


@pytest.mark.parametrize(
    ("template", "effort", "text"),
    [
        ("{{ reasoning_effort }}", "high", "high"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ enable_thinking }}", "low", "True"),
        ("{{ thinking }}", "none", "False"),
        ("<think>", "medium", "<think>"),
        ("a", "none", "a"),
    ],
)
def test_reasoning_effort_is_a_variable_of_the_template(template: str, effort: str, text: str) -> None:
    with serving(make_engine("none", max_len=64), chat_template=template) as running:
        assert rendered(running, reasoning_effort=effort) == text


@pytest.mark.parametrize(
    ("reasoning", "text"),
    [
        ({"effort": "high"}, "high"),
        ({"enabled": False}, "none"),
        ({"enabled": True}, "medium"),
        ({"enabled": True, "effort": "low"}, "low"),
        ({"exclude": True}, ""),
        ({}, ""),
    ],
)
def test_reasoning_has_an_effort_or_a_switch(efforts: Running, reasoning: dict[str, Any], text: str) -> None:
    assert rendered(efforts, reasoning=reasoning) == f"effort: {text}"


@pytest.fixture(scope="module")
def efforts() -> Iterator[Running]:
    """Yield a server whose template writes the effort."""
    with serving(make_engine("none", max_len=64), chat_template="effort: {{ reasoning_effort }}") as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "low"}, 'reasoning_effort is "low", expected none or "high" with reasoning', "reasoning_effort"),
        ({"reasoning": {"effort": "none", "enabled": True}}, 'reasoning is {"effort": "none", "enabled": true}, expected an effort that agrees with enabled', "reasoning"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens is 5, expected none (this field is not supported)", "reasoning.max_tokens"),
    ],
)  # fmt: skip
def test_reasoning_that_contradicts_itself_is_refused(
    efforts: Running, fields: dict[str, Any], message: str, param: str
) -> None:
    assert efforts.error(CHAT, conversation(**fields)) == (400, message, param)


def test_reasoning_effort_of_a_template_that_always_thinks_is_refused() -> None:
    with serving(make_engine("none", max_len=64), chat_template="<think>") as running:
        message = 'reasoning_effort is "none", expected none or "medium" (the chat template does not read it)'
        assert running.error(CHAT, conversation(reasoning_effort="none")) == (400, message, "reasoning_effort")
        message = message.replace("reasoning_effort", "reasoning.effort")
        fields = conversation(reasoning={"enabled": False})
        assert running.error(CHAT, fields) == (400, message, "reasoning.effort")


# --- constraints by the names of other servers


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["abé", 'd"e']}, ("abé", 'd"e')),
        ({"guided_regex": "ab|cd"}, ("ab", "cd")),
        ({"guided_grammar": 'root ::= "ab"'}, ("ab",)),
        ({"guided_json": {"const": 1}}, ("1",)),
        ({"structured_outputs": {"choice": ["ab", "cd"]}}, ("ab", "cd")),
        ({"structured_outputs": {"regex": "ab"}}, ("ab",)),
        ({"structured_outputs": {"json": '{"const": 1}'}}, ("1",)),
        ({"structured_outputs": {"grammar": 'root ::= "ab"'}}, ("ab",)),
        ({"json_schema": '{"const": 1}'}, ("1",)),
    ],
)
def test_constraints_of_other_servers_hold(server: Running, fields: dict[str, Any], texts: tuple[str, ...]) -> None:
    with server.client() as client:
        got = client.completions.create(model=NAME, prompt=TEXT, max_tokens=20, extra_body=fields)
        assert got.choices[0].text in texts and got.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"guided_json": {}, "response_format": {"type": "json_object"}},
         "guided_json is given, expected none with response_format", "guided_json"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}},
         "structured_outputs.grammar is given, expected none with structured_outputs.regex", "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "a"}},
         'structured_outputs.structural_tag is "a", expected none (this field is not supported)',
         "structured_outputs.structural_tag"),
    ],
)  # fmt: skip
def test_second_constraint_is_refused(server: Running, fields: dict[str, Any], message: str, param: str) -> None:
    assert server.error(CHAT, conversation(**fields)) == (400, message, param)


def test_prediction_is_a_hint_to_an_engine_without_ngram(server: Running) -> None:
    with server.client() as client:
        got = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": TEXT}],
            max_tokens=4,
            prediction={"type": "content", "content": [{"type": "text", "text": TEXT}]},
        )
    (want,) = server.engine.generate(f"user: {TEXT}\nassistant:", SamplingParams(4))
    assert got.choices[0].message.content == want.text
