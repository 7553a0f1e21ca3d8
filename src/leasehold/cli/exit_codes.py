"""Exit codes, which are a contract: scripts decide by them. The numbers are those of sysexits.h where it has one."""

from __future__ import annotations

from typing import Final

from leasehold.errors import LeaseholdError, LeaseLost, NotAcquired, Unavailable

OK: Final = 0
NOT_SHOWN: Final = 1  # of `demo` alone
USAGE: Final = 64  # the command line itself is wrong
UNREACHABLE: Final = 69  # the engine did not answer: neither yes nor no
BUSY: Final = 75  # somebody else holds it, or the wait ran out
NOT_PERMITTED: Final = 77
CONFIG: Final = 78  # the URL, the engine or the name's kind: trying again will not help
LOST: Final = 79  # the lease ended while it was needed
CANNOT_RUN: Final = 126  # found, but not to be run
NOT_FOUND: Final = 127
SIGNALLED: Final = 128  # plus the number of the signal

# For the manual; `run` has the child's own code besides.
MEANING: Final = {
    OK: "done; a query worked, whatever it found",
    NOT_SHOWN: "`demo`: what was to be shown was not seen",
    USAGE: "the command line is wrong; nothing was done",
    UNREACHABLE: "the engine did not answer",
    BUSY: "busy, or the wait ran out (`run -E CODE` changes it)",
    NOT_PERMITTED: "not permitted",
    CONFIG: "bad configuration: the URL, the database, or the name is in use as another kind",
    LOST: "the lease was lost",
    CANNOT_RUN: "CMD was found but cannot be run",
    NOT_FOUND: "CMD was not found",
    SIGNALLED: "128+n: ended by signal n",
}


def code_for(error: LeaseholdError) -> int:
    """The code an error ends the program with."""
    if isinstance(error, NotAcquired):
        return BUSY
    if isinstance(error, LeaseLost):
        return LOST
    if isinstance(error, Unavailable):
        return UNREACHABLE
    return CONFIG
