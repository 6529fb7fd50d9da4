"""Streaming parsers of generated text: reasoning, tool calls, and text, by the formats of families of models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .harmony import Harmony
from .items import Item, Parser, Reasoning, Span, ToolCall, Tools
from .reasoning import ReasoningByTokens, ReasoningTags, TaggedReasoning, ThinkTokens
from .sections import DeepSeekV3, DeepSeekV31, Glm45, Hermes, KimiK2, MiniMaxM2, Mistral, Qwen3Coder, Sections
from .whole_texts import FirstCall, Llama3, OneCall, PlainText, Pythonic

# By vLLM's names.
TOOL_PARSERS: dict[str, type[Sections | Llama3 | Pythonic | Harmony]] = {
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "glm45": Glm45,
    "hermes": Hermes,
    "kimi_k2": KimiK2,
    "llama3_json": Llama3,
    "minimax_m2": MiniMaxM2,
    "mistral": Mistral,
    "openai": Harmony,
    "pythonic": Pythonic,
    "qwen3_coder": Qwen3Coder,
}
# None: the format of `Harmony`.
REASONING_PARSERS: dict[str, ReasoningTags | None] = {
    "deepseek_r1": ReasoningTags(from_start=True),
    "glm45": ReasoningTags(),
    "gpt_oss": None,
    "kimi_k2": ReasoningTags(answers=KimiK2.MARKERS[:1]),
    "minimax_m2": ReasoningTags(from_start=True),
    "nemotron": ReasoningTags(),
    "qwen3": ReasoningTags(),
}
# Other names of the same formats, some of SGLang.
ALIASES = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseek_v3_1": "deepseek_v31",
    "gpt_oss": "openai",
    "kimi": "kimi_k2",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "nemotron_v3": "nemotron",
    "openai_gptoss": "gpt_oss",
}


def known_name(flag: str, name: str, known: Mapping[str, object]) -> str:
    """Return the name of a parser, given that name, another engine's, or one with hyphens.

    Raises:
        ValueError: there is no such parser; the message names the flag.
    """
    plain = name.replace("-", "_").lower()
    for one in (plain, ALIASES.get(plain, "")):
        if one in known:
            return one
    raise ValueError(f"{flag} is {name}, expected one of {', '.join(known)}")


def tool_parser_for(template: str) -> str:
    """Return the name of the tool parser for a chat template, by the tags that it writes."""
    tags = {
        "<|channel|>": "openai",
        "[TOOL_CALLS]": "mistral",
        "<|tool_calls_section_begin|>": "kimi_k2",
        "<minimax:tool_call>": "minimax_m2",
        "<arg_key>": "glm45",
        "<parameter=": "qwen3_coder",
        "<|python_start|>": "pythonic",
    }
    if DeepSeekV3.MARKERS[0] in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    name = next((name for tag, name in tags.items() if tag in template), None)
    if name is None and re.search(r"\[func\w*\(", template):
        name = "pythonic"
    is_llama = "<tool_call>" not in template and '"parameters"' in template
    return name or ("llama3_json" if is_llama else "hermes")


def reasoning_parser_for(template: str) -> str | None:
    """Return the name of the reasoning parser for a chat template; None: its model does not reason."""
    if "<|channel|>" in template:
        return "gpt_oss"
    return "qwen3" if ReasoningTags().end in template or ReasoningTags().begin in template else None


@dataclass(frozen=True)
class Format:
    """The format of a model's reasoning and tool calls.

    Attributes:
        tools: name of the tool parser.
        reasoning: name of the reasoning parser; None: reasoning stays in the text.
    """

    tools: str
    reasoning: str | None

    @property
    def is_harmony(self) -> bool:
        """Whether the text consists of messages in channels."""
        return self.reasoning == "gpt_oss" or self.tools == "openai"

    def tags(self, has_tools: bool) -> Sequence[str]:
        """Return the tags that parsers read; some may be special tokens."""
        if self.is_harmony:
            return Harmony.TOKENS
        tags = REASONING_PARSERS[self.reasoning] if self.reasoning else None
        reasoning = (tags.begin, tags.end, *tags.answers) if tags else ()
        return [*reasoning, *(TOOL_PARSERS[self.tools].TOKENS if has_tools else ())]

    def parser(self, tools: Tools, prompt_end: str = "", *, separate_reasoning: bool = True) -> Parser:
        """Return a parser of one text.

        Args:
            tools: that may be called; without any, calls are text.
            prompt_end: end of the prompt, in which the chat template may have begun reasoning.
            separate_reasoning: False: reasoning stays in the text.
        """
        if self.is_harmony:
            return Harmony(tools, prompt_end, separate=separate_reasoning and self.reasoning is not None)
        parser = self.answer_parser(tools)
        tags = REASONING_PARSERS[self.reasoning] if self.reasoning else ReasoningTags()
        assert tags is not None
        separate = separate_reasoning and self.reasoning is not None
        return TaggedReasoning(parser, tags, inside=tags.begins_inside(prompt_end), separate=separate)

    def answer_parser(self, tools: Tools) -> Parser:
        """Return a parser of a text without reasoning."""
        return TOOL_PARSERS[self.tools](tools) if tools else PlainText()

    def think_tokens(
        self, tokens: Mapping[str, int], token_text: Callable[[int], str], prompt_end: str, continued: str | None
    ) -> ThinkTokens | None:
        """Return what marks the reasoning before a constrained answer; None: the answer begins at once.

        Args:
            tokens: the tokens of the vocabulary that are tags.
            token_text: returns what a token adds to a text.
            prompt_end: end of the prompt, in which the chat template may have begun or ended reasoning.
            continued: the text of the message that the answer continues; None: it is a message of its own.
        """
        tags = None if self.is_harmony or self.reasoning is None else REASONING_PARSERS[self.reasoning]
        if tags is None or tags.end not in tokens:
            return None
        if continued is None:
            inside = tags.begins_inside(prompt_end)
            may_begin = tags.begin in tokens and not prompt_end.rstrip().endswith(tags.end)
        else:
            inside = continued.rfind(tags.begin) > continued.rfind(tags.end)
            may_begin = False
        if not inside and not may_begin:
            return None
        end = tokens[tags.end]
        never = [tokens[tag] for tag in tags.answers if tag in tokens]
        return ThinkTokens(end, token_text(end), tokens.get(tags.begin), inside, never)


def format_of(template: str, tools: str | None, reasoning: str | None) -> Format:
    """Return the format of a model by the names of its parsers, or for those that are None by its chat template.

    The reasoning parser "none" leaves reasoning in the text.
    """
    tool_parser = known_name("--tool-call-parser", tools, TOOL_PARSERS) if tools else tool_parser_for(template)
    if reasoning is None:
        return Format(tool_parser, reasoning_parser_for(template))
    name = known_name("--reasoning-parser", reasoning, {**REASONING_PARSERS, "none": None})
    return Format(tool_parser, None if name == "none" else name)


__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "FirstCall",
    "Format",
    "Item",
    "OneCall",
    "Parser",
    "PlainText",
    "Reasoning",
    "ReasoningByTokens",
    "Span",
    "ThinkTokens",
    "ToolCall",
    "Tools",
    "format_of",
    "reasoning_parser_for",
    "tool_parser_for",
]
