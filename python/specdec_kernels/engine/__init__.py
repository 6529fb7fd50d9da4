"""The engine: loads a target and a draft, batches requests continuously, and generates by speculative decoding."""

import warnings
from typing import Any

from ..models.heads.checkpoint import HeadCheckpoint
from .acceptance import AcceptanceRates, DraftAcceptance
from .async_engine import AsyncEngine, AsyncRequest, merge_streams
from .drafts import (
    MTP,
    AttentionCall,
    Committed,
    DFlash,
    DFlash2,
    Draft,
    DraftBudget,
    DraftContext,
    DraftRequest,
    DraftState,
    DrawnFrom,
    DSpark,
    Eagle,
    Eagle3,
    HasPools,
    HasWeights,
    Idleable,
    JetSpec,
    Learner,
    Migratable,
    Needs,
    Ngram,
    PrefillRows,
    Proposal,
    ScoredTree,
    Standalone,
    Union,
)
from .engine import Engine
from .options import EngineOptions
from .outputs import GenerationError, NewTokens, RequestOutput, RequestStats, TokenLogprob
from .params import SamplingParams
from .request import Request
from .stats import EngineStats
from .transfer.migration import ExportedRequest

__all__ = [
    "MTP",
    "AcceptanceRates",
    "AsyncEngine",
    "AsyncRequest",
    "AttentionCall",
    "Committed",
    "DFlash",
    "DFlash2",
    "DSpark",
    "Draft",
    "DraftAcceptance",
    "DraftBudget",
    "DraftContext",
    "DraftRequest",
    "DraftState",
    "DrawnFrom",
    "Eagle",
    "Eagle3",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "ExportedRequest",
    "GenerationError",
    "HasPools",
    "HasWeights",
    "HeadCheckpoint",
    "Idleable",
    "JetSpec",
    "Learner",
    "Migratable",
    "Needs",
    "NewTokens",
    "Ngram",
    "PrefillRows",
    "Proposal",
    "Request",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "ScoredTree",
    "Standalone",
    "TokenLogprob",
    "Union",
    "merge_streams",
]


def __getattr__(name: str) -> Any:
    if name == "merged":
        warnings.warn("engine.merged is engine.merge_streams since 0.3.0", DeprecationWarning, stacklevel=2)
        return merge_streams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
