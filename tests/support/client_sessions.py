"""Sessions of other packages' clients with a server: `python client_sessions.py NAME URL`, in any environment with the client.

The server answers plain chats with the texts of `SCRIPTS`, one after the other, and forced tools and schemas with what its
model makes of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel

MODEL = "tiny"
ARGUMENTS = {"width": 3, "unit": "m"}
CALL = f"<tool_call>{json.dumps({'name': 'area', 'arguments': ARGUMENTS})}</tool_call>"
HELLO = "Hello, wörld!"
QUESTION: list[Any] = [{"role": "user", "content": "What is the area?"}]
OPTIONS: dict[str, Any] = {"temperature": 1, "max_tokens": 300}


class Corner(BaseModel):
    """A corner of a shape."""

    side: Literal["left", "right"]


class Shape(BaseModel):
    """A shape, with nested models."""

    corner: Corner
    other: Corner | None
    width: int


def area(width: int, unit: str) -> str:
    """Return the area of a square."""
    return f"{width * width} {unit}²"


def openai_session(url: str) -> None:
    import openai

    with openai.OpenAI(base_url=url, api_key="any") as client:
        given: Any = {"model": MODEL, "messages": QUESTION, **OPTIONS}
        assert client.chat.completions.create(**given).choices[0].message.content == HELLO
        chunks = client.chat.completions.create(**given, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
        assert client.chat.completions.parse(**given, response_format=Shape).choices[0].message.parsed
        tool: Any = openai.pydantic_function_tool(Shape, name="draw")
        calls = (
            client.chat.completions.parse(**given, tools=[tool], tool_choice="required").choices[0].message.tool_calls
        )
        assert calls and isinstance(calls[0].function.parsed_arguments, Shape)
        with client.chat.completions.stream(**given, response_format=Shape) as stream:
            assert stream.get_final_completion().choices[0].message.parsed
        got = client.responses.parse(model=MODEL, input="x", text_format=Shape, max_output_tokens=300)
        assert isinstance(got.output_parsed, Shape)


def langchain_session(url: str) -> None:
    from langchain_openai import ChatOpenAI

    for responses in (False, True):
        model: Any = ChatOpenAI(model=MODEL, base_url=url, api_key="any", use_responses_api=responses, **OPTIONS)
        assert model.invoke("Hello").text == HELLO
        assert "".join(chunk.text for chunk in model.stream("Hello")) == HELLO
        assert isinstance(model.with_structured_output(Shape).invoke("x"), Shape)
        (call,) = model.bind_tools([area]).invoke("What is the area?").tool_calls
        assert (call["name"], call["args"]) == ("area", ARGUMENTS)
        calls = model.bind_tools([Shape], tool_choice="Shape", parallel_tool_calls=False).invoke("x").tool_calls
        assert calls[0]["name"] == "Shape" and Shape(**calls[0]["args"])


def litellm_session(url: str) -> None:
    import litellm

    given: Any = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "any", "messages": QUESTION, **OPTIONS}
    assert litellm.completion(**given).choices[0].message.content == HELLO
    chunks = litellm.completion(**given, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == HELLO
    message = litellm.completion(**given).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", HELLO)
    assert Shape.model_validate_json(litellm.completion(**given, response_format=Shape).choices[0].message.content)
    given.pop("messages")
    given.pop("max_tokens")
    got = litellm.responses(**given, input="Hello", max_output_tokens=100)
    assert got.output[-1].content[0].text == HELLO


def instructor_session(url: str) -> None:
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="any"), mode=mode)
        got = client.chat.completions.create(
            model=MODEL, messages=QUESTION, response_model=Shape, max_retries=0, **OPTIONS
        )
        assert isinstance(got, Shape)


def pydantic_ai_session(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="any")
    settings: Any = OPTIONS
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model: Any = kind(MODEL, provider=provider)
        assert isinstance(Agent(model, output_type=Shape, model_settings=settings).run_sync("x").output, Shape)
        agent: Any = Agent(model, tools=[area], model_settings=settings)
        result = agent.run_sync("What is the area?")
        assert result.output == HELLO and "9 m²" in str(result.all_messages())


def llama_index_session(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model: Any = OpenAILike(
        model=MODEL, api_base=url, api_key="any", is_chat_model=True, is_function_calling_model=True
    )
    messages = [ChatMessage(role="user", content="Hello")]
    assert model.chat(messages).message.content == HELLO
    assert "".join(chunk.delta or "" for chunk in model.stream_chat(messages)) == HELLO
    assert model.complete("Hello").text == HELLO


def agents_session(url: str) -> None:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=url, api_key="any"), use_for_tracing=False)
    settings = agents.ModelSettings(temperature=1, max_tokens=300)
    agent = agents.Agent(name="a", model=MODEL, tools=[agents.function_tool(area)], model_settings=settings)
    result = agents.Runner.run_sync(agent, "What is the area?")
    assert result.final_output == HELLO and "9 m²" in str(result.new_items)
    shapes = agents.Agent(name="b", model=MODEL, output_type=Shape, model_settings=settings)
    assert isinstance(agents.Runner.run_sync(shapes, "x").final_output, Shape)

    async def stream() -> str:
        streamed = agents.Runner.run_streamed(agent, "What is the area?")
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)

    assert asyncio.run(stream()) == HELLO


# The package that each session needs, and the answers to its plain chats in order; the last one repeats.
SCRIPTS: dict[str, tuple[str, list[str]]] = {
    "openai": ("openai", [HELLO]),
    "langchain": ("langchain_openai", [HELLO, HELLO, CALL] * 2),
    "litellm": ("litellm", [HELLO, HELLO, f"<think>Hm.</think>{HELLO}", HELLO]),
    "instructor": ("instructor", [HELLO]),
    "pydantic_ai": ("pydantic_ai", [CALL, HELLO] * 2),
    "llama_index": ("llama_index.llms.openai_like", [HELLO]),
    "agents": ("agents", [CALL, HELLO] * 2),
}

if __name__ == "__main__":
    globals()[f"{sys.argv[1]}_session"](sys.argv[2])
