"""The conformance cases, by what they are about. Importing this package enters them all into `CASES`."""

from leasehold.testing.cases import ending, granting, line, losing, once, several, shapes, silence, unanswered, using
from leasehold.testing.choosing import CASES

__all__ = [
    "CASES",
    "ending",
    "granting",
    "line",
    "losing",
    "once",
    "several",
    "shapes",
    "silence",
    "unanswered",
    "using",
]
