"""A proof that speculation does not change a server's text: the same requests to two servers of OpenAI's API.

`specdec check-exact` runs it; docs/exactness.md says what is sent, and how causes of differences are found. The package
needs the standard library only, and works with any server of that API.
"""

from .cases import BEGUN, FEATURES, IDS
from .check import Counts, Options, Result, Run
from .client import Endpoint, Unreachable
from .judge import Finding
from .questions import BATCH, DIFFERENCE, NEAR_TIE, STREAM
from .report import as_json, lines_of, rows_of, verdict_of
from .sides import DIALECTS, Side, open_side

__all__ = [
    "BATCH",
    "BEGUN",
    "DIALECTS",
    "DIFFERENCE",
    "FEATURES",
    "IDS",
    "NEAR_TIE",
    "STREAM",
    "Counts",
    "Endpoint",
    "Finding",
    "Options",
    "Result",
    "Run",
    "Side",
    "Unreachable",
    "as_json",
    "lines_of",
    "open_side",
    "rows_of",
    "verdict_of",
]
