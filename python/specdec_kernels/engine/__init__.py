"""The engine: loads a target and a draft, batches requests continuously, and generates by speculative decoding."""

from .async_engine import AsyncEngine, AsyncRequest, merged
from .device.kv_buckets import AttentionCall
from .drafts import (
    Committed,
    Draft,
    DraftContext,
    DraftRequest,
    DrawnFrom,
    Eagle,
    Eagle3,
    Needs,
    Ngram,
    Proposal,
    ScoredTree,
    Standalone,
    Union,
)
from .engine import Engine
from .options import EngineOptions
from .outputs import EngineStats, GenerationError, NewTokens, RequestOutput, RequestStats, TokenLogprob
from .params import SamplingParams
from .request import Request
from .transfer.migration import ExportedRequest

__all__ = [
    "AsyncEngine",
    "AsyncRequest",
    "AttentionCall",
    "Committed",
    "Draft",
    "DraftContext",
    "DraftRequest",
    "DrawnFrom",
    "Eagle",
    "Eagle3",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "ExportedRequest",
    "GenerationError",
    "Needs",
    "NewTokens",
    "Ngram",
    "Proposal",
    "Request",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "ScoredTree",
    "Standalone",
    "TokenLogprob",
    "Union",
    "merged",
]
