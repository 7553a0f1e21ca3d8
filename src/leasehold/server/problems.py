"""Every error as a problem document (RFC 9457): what a caller is told, and nothing about the engine's address.

`done: false` in a problem means that the engine was never asked, so nothing is pending, and the caller may ask
another server at once. Any other 503 leaves the outcome unknown: repeat the request with the same id, or release.
"""

from __future__ import annotations

from typing import Any, Final

from leasehold.engines.remote.wire import PROBLEM_TYPE
from leasehold.errors import (
    ConfigError,
    LeaseholdError,
    ListingTooLong,
    Mismatch,
    NotSent,
    Unavailable,
    Unsupported,
)
from leasehold.model import Busy, Gone

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER: Final = 1.0  # seconds, of a refusal that another try may end

# kind -> statuses, title. The titles are fixed texts; `detail` says what happened this time.
KINDS: Final[dict[str, tuple[tuple[int, ...], str]]] = {
    "busy": ((409,), "Another holder has the name"),
    "mismatch": ((409,), "The name is in use as another kind of lock"),
    "lost": ((410,), "The lease is over"),
    "unsupported": ((422,), "The engine of this server does not support this"),
    "invalid": ((400, 422), "The request is not valid"),
    "unauthorized": ((401,), "The request has no valid credentials"),
    "forbidden": ((403,), "The API key does not permit this"),
    "not-found": ((404,), "There is no such path"),
    "method-not-allowed": ((405,), "The path does not have this method"),
    "moved-on": ((412,), "The lease that was to be broken is over"),
    "slow": ((408,), "The request did not arrive in time"),
    "too-large": ((413, 431), "The request is too large"),
    "too-many": ((429,), "A limit of this API key is reached"),
    "internal": ((500,), "The server failed: this is a bug"),
    "engine-unavailable": ((503,), "The engine did not answer"),
    "draining": ((503,), "The server is shutting down"),
    "overloaded": ((503,), "The server is overloaded"),
}


class Problem(LeaseholdError):
    """A request that gets a problem document as its answer. `fields` are extension members of the document."""

    def __init__(self, kind: str, status: int, detail: str, *, retry_after: float | None = None, **fields: Any) -> None:
        self.kind, self.status, self.fields, self.retry_after = kind, status, fields, retry_after
        super().__init__(detail)


class Forbidden(Problem):
    """The caller has no right to do this. Namespace and name, or prefix, are for the audit log."""

    def __init__(self, who: str, verb: str, namespace: str, name: str, what: str = "this name") -> None:
        self.namespace, self.name = namespace, name
        super().__init__("forbidden", 403, f"{who} may not {verb} {what}")


class ServerOverloaded(Problem):
    """A limit of the whole server is reached. The engine was not asked. `retry_after=None`: waiting does not help."""

    def __init__(self, detail: str, retry_after: float | None = RETRY_AFTER) -> None:
        super().__init__("overloaded", 503, detail, retry_after=retry_after, done=False)


class TooMany(Problem):
    """A limit of this caller is reached. The engine was not asked."""

    def __init__(self, detail: str, retry_after: float = RETRY_AFTER) -> None:
        super().__init__("too-many", 429, detail, retry_after=retry_after, done=False)


class Draining(Problem):
    """The server is shutting down. `done=False`: the engine was not asked; otherwise it keeps the claim's position."""

    def __init__(self, detail: str = "this server is shutting down: ask another one", **fields: Any) -> None:
        super().__init__("draining", 503, detail, retry_after=RETRY_AFTER, **fields)


def invalid(detail: str, status: int = 422) -> Problem:
    return Problem("invalid", status, detail)


def busy(name: str, reply: Busy, waited: float, detail: str = "") -> Problem:
    holder = reply.holder
    fields: dict[str, Any] = {
        "name": name,
        "holder": holder.label if holder else None,
        "purpose": (holder.purpose or None) if holder else None,
        "token": reply.token,
        "left": reply.left,
        "position": reply.position,
        "waited": waited,
    }
    who = f"is held by {holder.label}" if holder and holder.label else "is not free"
    return Problem("busy", 409, detail or f"{name} {who}: wait longer, or try again later", **fields)


def lost(name: str, reply: Gone) -> Problem:
    detail = f"the lease of {name} is over ({reply.reason}): stop the work that it protects"
    return Problem("lost", 410, detail, name=name, reason=reply.reason)


def moved_on(name: str, token: int) -> Problem:
    detail = f"no grant of {name} has token {token} any more, so nothing was broken: list the lock again"
    return Problem("moved-on", 412, detail, name=name, token=token)


def problem_for(error: BaseException) -> Problem:
    """The problem that an error becomes. Texts of engines stay in the server's log: they may contain an address."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, Mismatch):
        return Problem("mismatch", 409, str(error), name=error.name, wanted=error.wanted, found=error.found)
    if isinstance(error, Unsupported):
        missing = ", ".join(error.missing) or "this request"
        detail = f"the engine of this server does not support {missing}"
        return Problem("unsupported", 422, detail, missing=list(error.missing))
    if isinstance(error, NotSent):
        detail = f"the engine did not answer the last calls, so this one was not sent; retry in {error.retry_in:.1f} s"
        return Problem("engine-unavailable", 503, detail, retry_after=error.retry_in, done=False)
    if isinstance(error, ListingTooLong):  # the text is our own: it names a number
        return Problem("engine-unavailable", 503, str(error), too_long=True)
    if isinstance(error, Unavailable):
        detail = "the engine did not answer: the outcome is unknown, so repeat the request with the same id, or release"
        fields = {"no_majority": True} if error.no_majority else {}
        return Problem("engine-unavailable", 503, detail, retry_after=RETRY_AFTER, **fields)
    if isinstance(error, ConfigError):  # of the engine: what callers send was checked before
        detail = "the engine refused the call: the log of this server says why"
        return Problem("engine-unavailable", 503, detail, retry_after=RETRY_AFTER)
    return Problem("internal", 500, "the server failed to answer this request: its log says why")


def document(problem: Problem) -> dict[str, Any]:
    """The members of the document. Clients tell problems apart by `type`."""
    return {
        "type": PROBLEM_TYPE + problem.kind,
        "title": KINDS[problem.kind][1],
        "status": problem.status,
        "detail": str(problem),
        **problem.fields,
    }
