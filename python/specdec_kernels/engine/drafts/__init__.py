"""Proposers of a round's tree: one class per method, all with the interface of `Draft`."""

from .base import Draft, DraftBudget, DraftRequest
from .block import DFlash, DFlash2, DSpark, JetSpec
from .capabilities import HasPools, HasWeights, Idleable, Learner, Migratable
from .context import DraftContext, DraftState, PrefillRows
from .eagle import Eagle, Eagle3
from .mtp import MTP
from .needs import AttentionCall, Needs
from .ngram import Ngram
from .proposal import Committed, DrawnFrom, Proposal, ScoredTree
from .standalone import Standalone
from .union import Union

__all__ = [
    "MTP",
    "AttentionCall",
    "Committed",
    "DFlash",
    "DFlash2",
    "DSpark",
    "Draft",
    "DraftBudget",
    "DraftContext",
    "DraftRequest",
    "DraftState",
    "DrawnFrom",
    "Eagle",
    "Eagle3",
    "HasPools",
    "HasWeights",
    "Idleable",
    "JetSpec",
    "Learner",
    "Migratable",
    "Needs",
    "Ngram",
    "PrefillRows",
    "Proposal",
    "ScoredTree",
    "Standalone",
    "Union",
]
