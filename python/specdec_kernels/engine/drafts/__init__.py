"""What proposes a round's tree: one class per method, all with the interface of `Draft`."""

from .base import Draft, DraftBudget, DraftContext, DraftRequest, Needs
from .eagle import Eagle, Eagle3
from .ngram import Ngram
from .proposal import Committed, DrawnFrom, Proposal, ScoredTree
from .standalone import Standalone
from .union import Union

__all__ = [
    "Committed",
    "Draft",
    "DraftBudget",
    "DraftContext",
    "DraftRequest",
    "DrawnFrom",
    "Eagle",
    "Eagle3",
    "Needs",
    "Ngram",
    "Proposal",
    "ScoredTree",
    "Standalone",
    "Union",
]
