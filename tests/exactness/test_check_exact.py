"""The check finds every defect of a proxy in front of a real server, names its request, and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import cli
from specdec_kernels.engine import MTP, Eagle3, Engine, Ngram, SamplingParams, Union
from specdec_kernels.exactness import BEGUN, DIFFERENCE, IDS, NEAR_TIE
from specdec_kernels.exactness.answers import Answer
from specdec_kernels.exactness.cases import BOTH, COMPLETIONS, FEATURES, Case, make_case
from specdec_kernels.exactness.check import Limits
from specdec_kernels.exactness.judge import Judge, Suspect, mismatches_of
from specdec_kernels.exactness.questions import Question
from specdec_kernels.exactness.sides import continues_ids, measured_limits
from specdec_kernels.tiny import tiny_model
from support.defective_proxy import DEFECTS, Defect, proxied, swap_token
from support.exact_servers import OFF, check, expect_exact, side_of
from support.exhaustive import exhaustive
from support.hybrid_servers import write_hybrid_with_mtp
from support.server_thread import Running, serving

PAIRS = 5000
SEED = 1
USED = {"stream", "seeded", "stop", "logprobs", "short", "named tool", "draft depth", "logit_bias"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    draft = Eagle3(tiny_model("eagle3"), num_steps=4, topk=4, num_nodes=16)
    engine = Engine(
        tiny_model("target"),
        draft=draft,
        max_len=256,
        num_slots=8,
        page_size=4,
        num_pages=800,
        dtype=torch.float32,
        device="cpu",
        adaptive=False,
        grammars=True,
        prefix_cache=True,
    )
    with serving(engine, max_queued=100) as running:
        yield running


@pytest.mark.exhaustive
def test_answers_of_5000_requests_are_equal(server: Running) -> None:
    count = int(os.environ.get("SPECDEC_PAIRS", PAIRS))
    expect_exact(check(side_of(server), side_of(server, **OFF), requests=count, max_tokens=24), side_of(server))


@pytest.mark.exhaustive
def test_answers_of_a_hybrid_with_an_mtp_layer_are_equal(tmp_path: Path, device: torch.device) -> None:
    """Trees of the layer and of n-grams, from snapshots of prefixes, with too few pages for all requests."""
    count = int(os.environ.get("SPECDEC_PAIRS", PAIRS))
    draft = Union(MTP(num_steps=3, topk=3, num_nodes=10), Ngram(num_nodes=8), num_nodes=10)
    engine = Engine(
        write_hybrid_with_mtp(tmp_path / "hybrid"),
        draft=draft,
        max_len=384,
        num_slots=8,
        page_size=4,
        num_pages=160,
        dtype=torch.float32,
        device=device,
        grammars=True,
        prefix_cache=True,
        rounds_in_flight=2,
    )
    with serving(engine, max_queued=100) as running:
        assert engine.generate([[5, 6, 7]], SamplingParams(48, ignore_eos=True))[0].stats.accept_length > 1.8
        ours, theirs = side_of(running), side_of(running, **OFF)
        expect_exact(check(ours, theirs, requests=count, max_tokens=24, context=256), ours)
        assert engine.stats().snapshots_restored > 0
        assert count < 1000 or engine.stats().retractions > 0


def test_seeded_requests_are_skipped_where_logits_have_16_bits_and_no_ids_are_known(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_kernels.exactness.check.logit_step", lambda _: 0.03125)
    skip = {*FEATURES} - {"seeded", "logprobs"}
    result = check(side_of(server), side_of(server, **OFF), requests=3, skip={*skip, IDS})
    assert result.probe.skipped == {"seeded": "logits have steps of 0.03125, and rounding decides draws"}
    assert result.pairs == 3 and "seeded" not in result.counts
    for kept in (
        check(side_of(server), side_of(server, **OFF), requests=3, skip={*skip, IDS}, limit=1e-3),
        check(side_of(server), side_of(server, **OFF), requests=3, skip=skip),
    ):
        assert not kept.probe.skipped and "seeded" in kept.counts


def test_a_wrong_seed_is_found_among_draws_that_16_bits_round(server: Running) -> None:
    """The server computes in 32 bits and the reference in 16, so that many draws differ."""
    rounded = Engine(tiny_model("target"), max_len=256, num_slots=8, dtype=torch.bfloat16, device="cpu")
    found = Finder(server)
    cases = [
        found.find(
            lambda case: found.plain(case, "seeded") and case.body["max_tokens"] == 16 and "top_p" not in case.body
        )
        for _ in range(6)
    ]
    wrong = cases[3]
    with serving(rounded, max_queued=100) as reference, proxied(server.port) as proxy:
        proxy.defects = {wrong.body["seed"]: DEFECTS["wrong seed"]}
        only = [case.index for case in cases]
        result = check(side_of(proxy.url), side_of(reference), only=only, skip={*FEATURES} - USED, shrink=0)
    assert result.limit == 0.5 and result.probe.step is not None
    assert [finding.suspect.case.index for finding in result.of_kind(DIFFERENCE)] == [wrong.index]
    margins = [finding.margin for finding in result.of_kind(NEAR_TIE)]
    assert margins and max(margins) < 0.25


def test_constrained_and_mixed_requests_are_explained_by_rounding_and_not_with_a_wrong_seed(server: Running) -> None:
    """Where a grammar, a forced call or several penalties choose: the place is asked for with the text so far."""
    options: dict[str, Any] = {"max_len": 256, "num_slots": 8, "device": "cpu", "grammars": True}
    wanted = {"json schema", "json object", "required tool", "named tool", "repetition_penalty"}
    limits = Finder(server).limits
    cases = [make_case(SEED, index, limits, {*FEATURES, *BOTH}) for index in range(250)]
    some = [case for case in cases if wanted & {*case.features} and "seeded" in case.features and not case.turns][:16]
    found, wrong = [], []
    with serving(Engine(tiny_model("target"), dtype=torch.bfloat16, **options), max_queued=100) as rounded:
        ours, theirs = (replace(side_of(one), gives_ids=True) for one in (server, rounded))
        assert continues_ids(ours, BOTH) and continues_ids(theirs, BOTH)
        judge = Judge(ours, theirs, 0.5, {*FEATURES, *BOTH, BEGUN})
        for case in some:
            question = Question(case.path, case.body, depth=case.depth)
            want = question.to_theirs(theirs)
            answers = [(found, question.to_ours(ours))]
            if "required tool" in case.features and not wrong:
                answers.append((wrong, question.with_fields(seed=case.body["seed"] + 1).to_ours(ours)))
            for kept, answer in answers:
                if mismatches := mismatches_of(answer, want, 0.5):
                    kept.append(judge.explained(Suspect(case, 0, question, answer, want, mismatches)))
    assert len(found) >= 3 and {finding and finding.kind for finding in found} == {NEAR_TIE}
    assert wrong == [None]


# --- defects of a server


class Finder:
    """Finds requests on which a defect shows."""

    def __init__(self, server: Running) -> None:
        self.side = side_of(server, **OFF)
        guess = Limits(256, 16, {}, 1500)
        self.limits = measured_limits(self.side, guess, COMPLETIONS)
        self.taken: set[int] = set()

    def find(self, accepts: Callable[[Case], bool]) -> Case:
        for index in range(4000):
            case = make_case(SEED, index, self.limits, {*USED, *BOTH})
            if index not in self.taken and not case.turns and accepts(case):
                self.taken.add(index)
                return case
        raise AssertionError("no such request")

    def ask(self, case: Case, **fields: Any) -> Answer:
        return self.side.ask(case.path, {key: v for key, v in (case.body | fields).items() if v is not None})

    def plain(self, case: Case, *features: str) -> bool:
        """Return whether a case is a completion with these features, and no others that get in the way."""
        return set(case.features) <= {"completion", "stream", *features} and set(features) <= set(case.features)

    def of_each_defect(self) -> dict[str, Case]:
        def text(case: Case) -> str:
            return self.ask(case).choices[0].text

        return {
            "swapped token": self.find(lambda case: self.plain(case) and not case.stream and len(text(case)) > 9),
            "lost last chunk": self.find(lambda case: self.plain(case, "stream") and len(text(case)) > 9),
            "lost space": self.find(lambda case: self.plain(case) and not case.stream and " " in text(case).strip()),
            "logprob": self.find(
                lambda case: self.plain(case, "logprobs") and not case.stream and case.body["max_tokens"] > 4
            ),
            "missed stop": self.find(
                lambda case: self.plain(case, "stop") and text(case) != self.ask(case, stop=None).choices[0].text
            ),
            "tool argument": self.find(
                lambda case: (
                    {"named tool"} <= {*case.features} <= {"chat", "named tool", "draft depth"}
                    and any(
                        c.isdigit() and c != "8" for c in next(iter(self.ask(case).choices[0].calls), ("", ""))[1][:12]
                    )
                )
            ),
            "wrong seed": self.find(
                lambda case: (
                    self.plain(case, "seeded")
                    and text(case) != self.ask(case, seed=case.body["seed"] + 1).choices[0].text
                )
            ),
            "leaked prefix": self.find(lambda case: self.plain(case, "short") and isinstance(case.body["prompt"], str)),
        }


FIELDS = {"logprob": "logprobs", "tool argument": "tool_calls"}


@pytest.fixture(scope="module")
def defective(server: Running) -> tuple[dict[str, Case], list[int]]:
    """Return a case for each defect, and the numbers of four cases that have none."""
    found = Finder(server)
    cases = found.of_each_defect()
    return cases, [found.find(lambda case: case.path == COMPLETIONS).index for _ in range(4)]


# By ids, the default run finds what shows in them: another token, and a longer prompt.
@pytest.mark.parametrize(
    ("by_ids", "chosen"),
    [(False, DEFECTS), (True, ("swapped token", "leaked prefix")), *exhaustive((True, DEFECTS))],
    ids=["texts", "some ids", "ids"],
)
def test_every_defect_is_found_and_its_request_named(
    server: Running, defective: tuple[dict[str, Case], list[int]], by_ids: bool, chosen: Collection[str]
) -> None:
    cases, others = {name: case for name, case in defective[0].items() if name in chosen}, defective[1]
    assert cases.keys() == {*chosen}
    with proxied(server.port) as proxy:
        proxy.defects = {case.body["seed"]: DEFECTS[name] for name, case in cases.items()}
        indices = sorted([*others, *(case.index for case in cases.values())])
        skip = {*FEATURES, IDS} - (USED | {IDS} if by_ids else USED)
        result = check(side_of(proxy.url), side_of(server, **OFF), only=indices, skip=skip)
    findings = {finding.suspect.case.index: finding for finding in result.of_kind(DIFFERENCE)}
    assert {case.index: name for name, case in cases.items()} == {
        index: next(name for name, case in cases.items() if case.index == index) for index in findings
    }
    assert len(result.findings) == len(cases) and not result.is_exact and result.limit == 1e-3
    for name, case in cases.items():
        finding = findings[case.index]
        field = "prompt_token_ids" if by_ids and name == "leaked prefix" else FIELDS.get(name, "text")
        assert finding.suspect.mismatches[0].field == field, name
        assert finding.reproduces == ("under load" if name == "leaked prefix" else "alone"), name
    smallest = [finding.smallest for finding in result.of_kind(DIFFERENCE)]
    assert all(smallest) and len(smallest[0].body["prompt"]) == 1 and smallest[0].body["max_tokens"] == 1


# --- the command


def test_command_reports_and_its_exit_code_says_what_it_found(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Finder(server).find(lambda case: {*case.features} == {"completion", "stop"})
    skip = ",".join(name for name in FEATURES if name not in USED)
    with proxied(server.port) as proxy:
        proxy.defects = {case.body["seed"]: Defect(answer=swap_token)}
        arguments = ["--skip", skip, "--max-tokens", "16", "--shrink", "0", "--report", str(tmp_path / "report.json")]
        command = ["check-exact", "--server", proxy.url, "--against", f"http://127.0.0.1:{server.port}/v1", *arguments]
        assert cli.main([*command, "--only", str(case.index)]) == 1
        said, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
        assert f"DIFFERENCE: request {case.index} (completion, stop)" in said and "smallest: curl http://" in said
        assert [one["request"] for one in report["differences"]] == [case.index] and not report["exact"]
        assert report["differences"][0]["sent"]["body"]["seed"] == case.body["seed"]
        assert report["token_ids"] and report["differences"][0]["sent"]["body"][IDS]
        assert cli.main([*command, "--only", str(case.index + 1)]) == 0
    assert "exact: 0 differences" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--server is missing, expected a URL, or --serve instead"),
        (["--server", "localhost:1"], "--server is localhost:1, expected http://HOST:PORT or https://HOST:PORT"),
        (["--server", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: [Errno 111] Connection refused"),
        (["--server", "http://x", "--skip", "nothing"], "--skip has 'nothing', expected one of prefix, multi-turn"),
        (["--server", "http://x", "--fields", "[1]"], "--fields is [1], expected a JSON object"),
        (
            ["--server", "http://x", "--report", "/no/file"],
            "--report is /no/file, expected a file in an existing folder",
        ),
    ],
)
def test_command_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-exact", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"specdec check-exact: {message}")
