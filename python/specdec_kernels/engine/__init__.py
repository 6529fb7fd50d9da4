"""The engine: loads a target and a draft, batches requests continuously, and generates by speculative decoding."""

from .engine import Engine
from .outputs import EngineStats, GenerationError, NewTokens, RequestOutput, RequestStats, TokenLogprob
from .params import SamplingParams, Speculation

__all__ = [
    "Engine",
    "EngineStats",
    "GenerationError",
    "NewTokens",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "Speculation",
    "TokenLogprob",
]
