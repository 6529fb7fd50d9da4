"""The report of a run, as JSON and as text."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from .check import Options, Result
from .judge import Finding
from .questions import BATCH, DIFFERENCE, NEAR_TIE, STREAM, Question
from .sides import Side, curl

Object = dict[str, Any]
SHOWN = 240  # characters of a value in the text


def as_json(result: Result, ours: Side, theirs: Side, options: Options, command: str, version: str) -> Object:
    """Return the report as values of JSON."""
    return {
        "tool": f"specdec_kernels {version} check-exact",
        "command": command,
        "exact": result.is_exact,
        "complete": result.complete,
        "server": facts_of(ours),
        "reference": facts_of(theirs),
        "options": plain(asdict(options)),
        "limits": plain(asdict(result.probe.limits)),
        "rounding": {"limit": result.limit, "measured_noise": result.probe.noise, "logit_step": result.probe.step},
        "pairs": result.pairs,
        "texts": result.texts,
        "tokens": result.tokens,
        "seconds": round(result.seconds, 1),
        "features": {name: asdict(result.counts[name]) for name in sorted(result.counts)},
        "token_ids": result.probe.has_ids,
        "skipped_features": result.probe.skipped,
        "features_of_one_server": [
            {"feature": name, "refused_by": which, "message": why} for name, which, why in result.probe.one_sided
        ],
        "refused_by_both": result.refused,
        "failed_on_both": result.failed,
        "differences": [finding_as_json(one, ours) for one in result.of_kind(DIFFERENCE, STREAM)],
        "near_ties": [finding_as_json(one, ours) for one in result.of_kind(NEAR_TIE)],
        "batch_rounding": [finding_as_json(one, ours) for one in result.of_kind(BATCH)],
    }


def facts_of(side: Side) -> Object:
    return {
        "url": side.endpoint.url,
        "model": side.model,
        "dialect": side.dialect,
        "fields": side.endpoint.fields,
        "context": side.context,
    }


def finding_as_json(finding: Finding, ours: Side) -> Object:
    suspect = finding.suspect
    facts: Object = {
        "request": suspect.case.index,
        "turn": suspect.turn,
        "kind": finding.kind,
        "features": list(suspect.case.features),
        "fields": [plain(asdict(mismatch)) for mismatch in suspect.mismatches],
        "evidence": finding.evidence,
        "margin": plain(finding.margin),
        "sent": question_as_json(suspect.question, ours),
    }
    if finding.reproduces is not None:
        facts["reproduces"] = finding.reproduces
    if finding.smallest is not None:
        facts["smallest"] = question_as_json(finding.smallest, ours)
        facts["smallest_neighbors"] = finding.smallest_neighbors
    return facts


def question_as_json(question: Question, ours: Side) -> Object:
    facts: Object = {
        "path": question.path,
        "body": ours.spelled(question.body, question.stream, question.depth) | ours.endpoint.fields,
    }
    if question.leaves_after is not None:
        facts["leaves_after_events"] = question.leaves_after
    return facts


def plain(value: Any) -> Any:
    """Return a value with lists for tuples and sets, and None for numbers that JSON has not."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rows_of(result: Result) -> list[list[str]]:
    """Return the table: feature, pairs, equal, explained by rounding, differences."""
    return [
        [name, str(one.pairs), str(one.equal), str(one.rounding), str(one.differences)]
        for name, one in sorted(result.counts.items(), key=lambda item: (-item[1].differences, -item[1].pairs, item[0]))
    ]


def lines_of(result: Result, ours: Side) -> list[str]:
    """Return the text below the table."""
    lines = [f"skipped: {name} ({why})" for name, why in result.probe.skipped.items()]
    lines += [f"refused by both, {count}x: {why}" for why, count in result.refused.items()]
    lines += [f"failed on both, {count}x: {why}" for why, count in result.failed.items()]
    for name, which, why in result.probe.one_sided:
        lines.append(f"DIFFERENCE: only the {which} refuses {name}: {why}")
    for finding in result.of_kind(DIFFERENCE, STREAM):
        lines += ["", *lines_of_finding(finding, ours)]
    margins = [one.margin for one in result.of_kind(NEAR_TIE) if one.margin is not None]
    if margins:
        lines.append(f"near ties: {len(margins)}, the largest margin {max(margins):.1e} of {result.limit:.1e}")
    if batch := result.of_kind(BATCH):
        lines.append(f"rounding under load: {len(batch)}; the reference's own runs differ there")
    return lines


def lines_of_finding(finding: Finding, ours: Side) -> list[str]:
    suspect = finding.suspect
    title = "DIFFERENCE" if finding.kind == DIFFERENCE else "STREAM"
    turn = f", turn {suspect.turn}" if suspect.case.turns else ""
    lines = [f"{title}: request {suspect.case.index}{turn} ({', '.join(suspect.case.features)}): {finding.evidence}"]
    for mismatch in suspect.mismatches[:3]:
        where = "" if mismatch.choice is None else f" of choice {mismatch.choice}"
        lines.append(f"  {mismatch.field}{where}: {shown(mismatch.ours)}")
        lines.append(f"  {'expected':>{len(mismatch.field + where)}}: {shown(mismatch.theirs)}")
    if finding.reproduces:
        lines.append(f"  reproduces: {finding.reproduces}")
    if finding.smallest is not None:
        question = finding.smallest
        lines.append(f"  smallest: {curl(ours, question.path, question.body, question.stream, question.depth)}")
    if finding.smallest_neighbors:
        lines.append(f"  while these run: {', '.join(map(str, finding.smallest_neighbors))}")
    return lines


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"


def verdict_of(result: Result) -> str:
    """Return the last line."""
    done = f"{result.pairs} pairs of answers, {result.texts} texts, {result.tokens} tokens in {result.seconds:.0f} s"
    near, batch = len(result.of_kind(NEAR_TIE)), len(result.of_kind(BATCH))
    explained = f"{near} near ties, {batch} times rounding under load"
    differences = len(result.of_kind(DIFFERENCE, STREAM)) + len(result.probe.one_sided) + sum(result.failed.values())
    ended = "" if result.complete else "; ended early: too many answers failed"
    return f"{'exact' if result.is_exact else 'NOT exact'}: {differences} differences, {explained}; {done}{ended}"
