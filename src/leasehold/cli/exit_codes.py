"""Exit codes. They are a contract, because scripts test them. The numbers are those of sysexits.h where it has one."""

from __future__ import annotations

from typing import Final

from leasehold.errors import AccessDenied, LeaseholdError, LeaseLost, NotAcquired, Unavailable

OK: Final = 0
CHECK_FAILED: Final = 1  # only `audit verify`, `demo` and `doctor`
DANGER: Final = 2  # only `doctor`
USAGE: Final = 64  # the command line itself is wrong
UNREACHABLE: Final = 69  # the engine did not answer: the outcome is unknown
OUTPUT: Final = 74  # stdout takes no data
BUSY: Final = 75  # another holder has the name, or the wait is over
NOT_PERMITTED: Final = 77
CONFIG: Final = 78  # the URL, the engine or the kind of the name: a retry will not help
LOST: Final = 79  # the lease ended while it was needed
CANNOT_RUN: Final = 126  # CMD was found, but cannot be executed
NOT_FOUND: Final = 127
SIGNALLED: Final = 128  # plus the number of the signal

# For the help. `run` and `elect` also exit with the code of CMD.
MEANING: Final = {
    OK: "success",
    CHECK_FAILED: "`audit verify`: a file was changed; `demo`: a demo did not behave as expected; "
    "`doctor`: warnings were found",
    DANGER: "`doctor`: a danger was found, or the engine cannot be used",
    USAGE: "usage error; nothing was done",
    UNREACHABLE: "the engine did not answer",
    OUTPUT: "the output could not be written",
    BUSY: "the name is busy, or the wait is over (-E CODE changes this code)",
    NOT_PERMITTED: "not permitted by the engine or the file system; `break`: you did not confirm",
    CONFIG: "configuration: URL, password, database, file, or a name in use as another kind of lock",
    LOST: "the lease was lost",
    CANNOT_RUN: "CMD was found but could not be executed",
    NOT_FOUND: "CMD was not found",
    SIGNALLED: "128+n: ended by signal n",
}


def code_for(error: LeaseholdError) -> int:
    """The exit code for an error."""
    if isinstance(error, NotAcquired):
        return BUSY
    if isinstance(error, LeaseLost):
        return LOST
    if isinstance(error, Unavailable):
        return UNREACHABLE
    if isinstance(error, AccessDenied):
        return NOT_PERMITTED
    return CONFIG
