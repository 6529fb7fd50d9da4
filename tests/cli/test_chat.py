"""`specdec chat`: turns of a conversation, as they are typed and shown."""

from __future__ import annotations

import io
from typing import Any

import pytest

from specdec_kernels import cli
from specdec_kernels.cli.chat import print_answer
from specdec_kernels.engine import RequestOutput, SamplingParams
from support.request_engines import make_engine

Capture = pytest.CaptureFixture[str]


def chat(monkeypatch: pytest.MonkeyPatch, typed: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return cli.main(["chat", "--device", "cpu", "--max-new-tokens", "16", *arguments])


def test_chat_answers_with_the_conversation_so_far(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Each answer follows from all that was said; after /clear from nothing; an empty line says nothing."""
    with make_engine("none", max_len=256) as engine:
        (first,) = engine.generate("import os\n", SamplingParams(16))
        (second,) = engine.generate(f"import os\n{first.text}\ndef area(\n", SamplingParams(16))
        (third,) = engine.generate("def area(\n", SamplingParams(16))
    assert chat(monkeypatch, "import os\n\ndef area(\n/clear\ndef area(\n") == 0
    out = capsys.readouterr().out
    assert out.startswith("the tiny model, NGRAM. /clear starts a new conversation")
    answers = [part.split("\n16 tokens, accept length ")[0] for part in out.split("> ")[1:]]
    wanted = [text.text for text in (first, second, third) if text.text is not None]
    assert [answer.strip("\n") for answer in answers if answer.strip()] == [text.strip("\n") for text in wanted]
    assert out.count("tokens/s") == 3 and "\033" not in out


def test_chat_reuses_the_cached_prefix_of_earlier_turns(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """In whole pages: the second prompt begins with the first one and its answer, unless the cache is disabled."""
    cached: list[tuple[int, int]] = []

    def noted(*arguments: Any) -> RequestOutput:
        output = print_answer(*arguments)
        cached.append((len(output.prompt_tokens), output.cached_tokens))
        return output

    monkeypatch.setattr("specdec_kernels.cli.chat.print_answer", noted)
    first = "import os; import sys; " * 4
    for flags in ([], ["--disable-radix-cache"]):
        assert chat(monkeypatch, f"{first}\ndef area(\n", "--page-size", "4", *flags) == 0
        (begin, none), (turn, hits) = cached
        assert none == 0 and turn > begin + 16
        assert begin - 5 <= hits <= turn - 2 if not flags else hits == 0
        cached.clear()


def test_chat_takes_a_system_message_and_exit(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with make_engine("none", max_len=256) as engine:
        (want,) = engine.generate("# Python\nimport os\n", SamplingParams(16, temperature=0.8, seed=3))
    assert (
        chat(
            monkeypatch, "import os\n/exit\nnever read\n", "--system", "# Python", "--temperature", "0.8", "--seed", "3"
        )
        == 0
    )
    out = capsys.readouterr().out
    assert want.text is not None and want.text.strip("\n") in out and out.count("tokens/s") == 1


def test_chat_survives_an_interrupted_answer(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """By an interrupt, which the conversation survives."""
    calls = 0

    def interrupt(self: object, new: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("specdec_kernels.cli.generate.Printer.__call__", interrupt)
    assert chat(monkeypatch, "import os\ndef area(\n", "--max-new-tokens", "1000") == 0
    assert capsys.readouterr().out.count("tokens/s") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "Engine: model is /nowhere, expected an existing folder or a hub id"),
        (["--temperature", "-1"], "--temperature is -1.0, expected a number from 0 (greedy) on"),
    ],
)
def test_chat_refuses_bad_flags(capsys: Capture, arguments: list[str], message: str) -> None:
    assert cli.main(["chat", "--device", "cpu", *arguments]) == 2
    assert capsys.readouterr().err == f"specdec chat: {message}\n"
