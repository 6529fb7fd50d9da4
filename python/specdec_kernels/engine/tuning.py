"""Calibrations and round costs of a target and a draft on a machine, as JSON (docs/tuning.md lists the keys).

`Engine.tuning` and `specdec tune --out` write them, `Engine(tuning=)` and `--tuning` read them. A tuning of another
draft is refused. Costs of other rounds are ignored, and rounds are measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _C, __version__
from .config import EngineConfig
from .drafts import Draft
from .drafts.calibrated import CalibratedDraft
from .drafts.composition import leaves
from .options import TuningSource
from .text.files import read_text

SCHEMA = 1
IDENTITY = "draft", "model", "target"  # of a calibration: the draft's class, the names of its model and of the target
# Limits of slopes and offsets, and of the nodes counted (csrc/draft/update_calibration.h).
SLOPES, MOST_OFFSET, MOST_NODES = (0.125, 8.0), 8.0, 1 << 14
MOST_LOGITS = MOST_NODES * 24 << 16

EXPECTED = "what `specdec tune --out` or `Engine.tuning` gave"


def read_tuning(source: TuningSource, name: str = "Engine: tuning") -> dict[str, Any]:
    """Read and check a tuning, given as a file or a dict; `name` is that of the option, for errors.

    Raises:
        OSError: no such file. ValueError: invalid content, or that of another schema version.
    """
    if isinstance(source, Mapping):
        what, tuning = f"{name} is a dict", dict(source)
    else:
        what = f"{name} is {source}"
        text = read_text(source, name)
        try:
            tuning = json.loads(text)
        except (ValueError, RecursionError):  # nested too deep
            raise ValueError(f"{what}, which is not JSON, expected {EXPECTED}") from None
    if not isinstance(tuning, dict) or "schema" not in tuning:
        raise ValueError(f"{what} without a schema, expected {EXPECTED}")
    if tuning["schema"] != SCHEMA:
        raise ValueError(f"{what} of schema {tuning['schema']}, expected schema {SCHEMA}")
    entries = tuning.get("calibrations", [])
    for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        if not (isinstance(entry, dict) and all(key in entry for key in IDENTITY) and is_calibration(entry)):
            raise ValueError(
                f"{what} with calibrations[{index}] that is none, expected {', '.join(IDENTITY)}, "
                "a table [D, 2] and counts [D, 16, 3]"
            )
    if (costs := tuning.get("costs")) is not None:
        try:
            costs_in(costs)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{what} with costs that are none, expected of, {', '.join(COSTS)}") from None
    return tuning


def is_calibration(entry: dict[str, Any]) -> bool:
    """Return whether an entry has a table and counts that `update_calibration` can have left."""
    try:
        table = torch.tensor(entry["table"], dtype=torch.float64)
        counts = torch.tensor(entry["counts"])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        return False
    if table.ndim != 2 or table.shape[1] != 2 or counts.shape != (len(table), 16, 3) or counts.dtype != torch.int64:
        return False
    slopes, offsets = table.T
    good = (slopes >= SLOPES[0]) & (slopes <= SLOPES[1]) & (offsets.abs() <= MOST_OFFSET)
    nodes, taken, logits = counts.unbind(-1)
    counted = (taken >= 0) & (taken <= nodes) & (nodes <= MOST_NODES)
    counted &= (logits >= -MOST_LOGITS) & (logits <= MOST_LOGITS)
    return bool(good.all() and counted.all() and (nodes.sum(1) <= MOST_NODES).all())


def tuning_of(draft: Draft, target: str, costs: _C.RoundCosts | None, rounds: dict[str, Any]) -> dict[str, Any]:
    """Return the tuning, as `read_tuning` takes it, of an open draft and the costs of its rounds."""
    return {
        "schema": SCHEMA,
        "specdec_kernels": __version__,
        "calibrations": [facts_of(part, target) for part in calibrated_parts(draft)],
        "costs": costs and costs_of(costs, rounds),
    }


def facts_of(part: CalibratedDraft, target: str) -> dict[str, Any]:
    """Return the calibration of a draft as JSON values, with its identity."""
    assert part.calibration is not None
    table, counts = part.calibration
    return {**identity_of(part, target), "table": table.tolist(), "counts": counts.tolist()}


# --- calibrations


def calibrated_parts(draft: Draft) -> list[CalibratedDraft]:
    """Return the parts of a draft that have a calibration."""
    return [part for part in leaves(draft) if isinstance(part, CalibratedDraft) and part.is_calibrated]


def identity_of(part: CalibratedDraft, target: str) -> dict[str, str]:
    """Return what a calibration belongs to."""
    return dict(zip(IDENTITY, (type(part).__name__, part.model_name, target), strict=True))


def calibrations_for(tuning: dict[str, Any], draft: Draft, target: str) -> list[dict[str, Any] | None]:
    """Return the calibration of each of `calibrated_parts`; None if the tuning has none.

    Raises:
        ValueError: the tuning has calibrations, but none of this draft.
    """
    entries = tuning.get("calibrations") or []
    found: list[dict[str, Any] | None] = []
    seen: list[dict[str, str]] = []
    for part in calibrated_parts(draft):
        own = identity_of(part, target)
        matching = [entry for entry in entries if all(entry[key] == own[key] for key in IDENTITY)]
        if entries and not matching:
            names = " and ".join(text_of(entry) for entry in entries)
            raise ValueError(f"Engine: tuning has a calibration of {names}, expected one of {text_of(own)}")
        # A union may have two drafts with one model, whose calibrations stand in their order.
        found.append(matching[min(seen.count(own), len(matching) - 1)] if matching else None)
        seen.append(own)
    return found


def text_of(identity: dict[str, Any]) -> str:
    """Return an identity in words."""
    return "{draft} ({model}) for {target}".format(**identity)


def calibrate(draft: Draft, calibrations: Sequence[dict[str, Any] | None]) -> None:
    """Copy the calibrations of `calibrations_for` into an open draft. Depths without an entry stay as they are."""
    for part, entry in zip(calibrated_parts(draft), calibrations, strict=True):
        if entry is not None:
            assert part.calibration is not None
            for own, given in zip(part.calibration, (entry["table"], entry["counts"]), strict=True):
                depths = min(len(own), len(given))
                own[:depths] = torch.tensor(given[:depths], dtype=own.dtype)


# --- costs


STORED_BY = "draft_weights", "kv_dtype"  # options of a draft that change the costs of its rounds


def rounds_of(model: Any, draft: Draft, config: EngineConfig, num_ranks: int = 1) -> dict[str, Any]:
    """Return what round costs depend on besides sizes; costs are reused only if all of it is equal."""
    device, shape = config.machine.device, model.to_dict()
    needs = config.needs
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "specdec_kernels": __version__,
        "captured": config.captures,
        "implementation": config.implementation,
        "dtype": str(config.dtype),
        "kv_dtype": str(config.kv_dtype),
        "quantized": (shape.get("quantization_config") or {}).get("quant_method"),
        "target": {
            key: value for key, value in sorted(shape.items()) if type(value) is int and not key.endswith("token_id")
        },
        "draft": {
            "parts": [
                [
                    type(part).__name__,
                    *([part.model_name] if isinstance(part, CalibratedDraft) else []),
                    *(str(how) for name in STORED_BY if (how := getattr(part, name, None)) is not None),
                ]
                for part in leaves(draft)
            ],
            "accept_width": needs.accept_width,
            "scratch_rows": needs.scratch_rows,
            "kv_numbers": needs.kv_numbers,
        },
        **({"ranks": num_ranks} if num_ranks > 1 else {}),
    }


COSTS = "batches", "rows", "us", "catch_up"


def costs_of(costs: _C.RoundCosts, rounds: dict[str, Any]) -> dict[str, Any]:
    """Return round costs as JSON values."""
    return {"of": rounds, **{key: getattr(costs, key) for key in COSTS}}


def costs_in(costs: Any) -> _C.RoundCosts:
    """Return the round costs from the JSON values of a tuning."""
    if not isinstance(costs["of"], dict):
        raise TypeError
    return _C.RoundCosts(*(costs[key] for key in COSTS))


def costs_for(tuning: dict[str, Any], rounds: dict[str, Any], config: EngineConfig) -> _C.RoundCosts | None:
    """Return the costs of rounds like these if the tuning has them, else None."""
    costs = tuning.get("costs")
    if costs is None or costs["of"] != rounds:
        return None
    found = costs_in(costs)
    sizes = list(config.batch_sizes), [list(rows) for rows in config.rows]
    fits = (found.batches, found.rows) == sizes and bool(found.catch_up) == (config.max_idle_rounds > 0)
    return found if fits else None
