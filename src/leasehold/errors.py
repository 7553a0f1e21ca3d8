"""Every error that Leasehold raises, and what it means for the caller.

    LeaseholdError
    ├── NotAcquired   (also TimeoutError)   another claim holds the name; wait longer, or try later
    ├── LeaseLost                           stop working on what the lock protects
    ├── Unavailable                         the engine did not answer; the outcome is unknown
    ├── Unsupported                         this engine cannot do what was asked; refused when built
    ├── Mismatch                            the name is in use with another kind or limit
    ├── SelfDeadlock  (also RuntimeError)   this thread or task already holds the name
    ├── StaleToken                          a resource refused a token older than one it has seen
    ├── Conflict                            another writer changed the value; read and decide again
    ├── RunFailed                           an earlier run failed, and its failure is kept
    └── ConfigError   (also ValueError)     a bad argument, URL or name; nothing was done

Each error has fields, shows them in its text, and survives pickling. No error carries a claim's secret id or a URL's
password.
"""

from __future__ import annotations

from typing import ClassVar

from leasehold.model import Holder, Reason

__all__ = [
    "ConfigError",
    "Conflict",
    "LeaseLost",
    "LeaseholdError",
    "Mismatch",
    "NotAcquired",
    "RunFailed",
    "SelfDeadlock",
    "StaleToken",
    "Unavailable",
    "Unsupported",
]


class LeaseholdError(Exception):
    """The base class of every error that Leasehold raises."""

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only fields are not in `args`, so pickle's default would lose them.
        return _rebuild, (type(self), str(self), self.__dict__.copy())


def _rebuild(kind: type[LeaseholdError], text: str, fields: dict[str, object]) -> LeaseholdError:
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    error.__dict__.update(fields)
    return error


class NotAcquired(LeaseholdError, TimeoutError):
    """The name did not become free within `wait`. Says who holds it, as far as the engine knows."""

    def __init__(
        self,
        name: str,
        *,
        holder: Holder | None = None,
        token: int | None = None,
        left: float | None = None,
        position: int | None = None,
        waited: float = 0.0,
    ) -> None:
        self.name, self.token, self.left, self.position, self.waited = name, token, left, position, waited
        self.holder = holder.label if holder else None
        self.host = holder.host if holder else None
        self.pid = holder.pid if holder else None
        self.purpose = holder.purpose if holder else None
        super().__init__(self.situation() + ("" if waited > 0 else "; pass wait=SECONDS to queue for it"))

    def situation(self) -> str:
        """Who holds the name, with everything an operator needs to find that process; without advice."""
        who = f"is held by {self.holder}" if self.holder else "is not free"
        facts = []
        if self.pid and f"{self.host}:{self.pid}" != self.holder:
            facts.append(f"pid {self.pid}" + (f" on {self.host}" if self.host else ""))
        if self.purpose:
            facts.append(self.purpose)
        if self.token:
            facts.append(f"token {self.token}")
        if self.left is not None:
            facts.append(f"{self.left:.1f} s left unless renewed")
        text = f"{self.name} {who}" + (f" ({', '.join(facts)})" if facts else "")
        if self.waited > 0:
            text += f"; gave up after {self.waited:.1f} s"
            if self.position is not None:
                text += f" {describe_position(self.position)}"
        return text


def describe_position(position: int) -> str:
    return f"at position {position} in the queue ({f'{position} ahead' if position else 'next'})"


class LeaseLost(LeaseholdError):
    """The lease can no longer be trusted. Stop the protected work: another client may hold the name from now on."""

    EXPLANATIONS: ClassVar[dict[Reason, str]] = {
        "expired": "the engine says that it expired",
        "broken": "an operator broke it",
        "unreachable": "the engine did not answer before the lease ran out",
        "stalled": "this process was stalled and did not renew it in time",
        "max_hold": "it was held for as long as max_hold allows",
        "forked": "it belongs to the parent of this forked process",
        "unknown": "the engine no longer knows it",
        "released": "it was released",
    }

    def __init__(self, name: str, *, reason: Reason = "unknown", token: int | None = None) -> None:
        self.name, self.reason, self.token = name, reason, token
        with_token = f" (token {token})" if token else ""
        super().__init__(
            f"the lease of {name}{with_token} is lost: {self.EXPLANATIONS[reason]}; stop the work it protects"
        )


class Unavailable(LeaseholdError):
    """The engine gave no usable answer. The outcome is unknown: the call may or may not have taken effect. If
    `retry_in` is set, the circuit breaker did not send the call, and tries again in so many seconds.

    `no_majority`: some servers answered, and without a majority they decide nothing: they are cut off from the others,
    the others are down, or an election is under way. False if no server answered, or if the engine cannot tell."""

    def __init__(
        self,
        text: str,
        *,
        engine: str = "",
        seconds: float | None = None,
        retry_in: float | None = None,
        no_majority: bool = False,
    ) -> None:
        self.engine, self.seconds, self.retry_in, self.no_majority = engine, seconds, retry_in, no_majority
        super().__init__(text)


class NotSent(Unavailable):
    """The circuit breaker refused the call: nothing was sent, so nothing must be undone."""


class Reentered(Unavailable):
    """A finaliser or signal handler called the engine while its own thread was inside that engine.

    Waiting there would never end. As after any `Unavailable`, the call is retried later where that is possible.
    """

    def __init__(self) -> None:
        super().__init__("called from a finaliser or signal handler while the same thread was inside the engine")


class Unsupported(LeaseholdError):
    """The engine, as configured, does not promise what the lock needs. Raised when the lock is built."""

    def __init__(self, text: str, *, engine: str = "", missing: tuple[str, ...] = ()) -> None:
        self.engine, self.missing = engine, missing
        super().__init__(text)


class Mismatch(LeaseholdError):
    """The name is in use with another kind or limit: two callers disagree about what it is."""

    def __init__(self, name: str, *, wanted: str, found: str, advice: str = "") -> None:
        self.name, self.wanted, self.found = name, wanted, found
        advice = advice or "use one kind and one limit for a name, or wait until it is idle"
        super().__init__(f"{name} is in use as a {found}, this call wants a {wanted}: {advice}")


class SelfDeadlock(LeaseholdError, RuntimeError):
    """This thread or task already holds the name, so waiting for it would never end."""

    def __init__(self, name: str, *, token: int | None = None, why: str = "") -> None:
        self.name, self.token = name, token
        super().__init__(
            f"{name} is already held by this thread or task"
            + (f" (token {token})" if token else "")
            + (f": {why}" if why else "")
        )


class StaleToken(LeaseholdError):
    """A protected resource has seen a higher token, so the lease with this token is over. Nothing was written."""

    def __init__(self, resource: str, *, token: int, highest: int, slot: int | None = None) -> None:
        self.resource, self.token, self.highest, self.slot = resource, token, highest, slot
        where = resource if slot is None else f"{resource}, slot {slot},"
        super().__init__(
            f"{where} refused token {token}: it has seen {highest}; the lease with the lower token is over"
        )


class Conflict(LeaseholdError):
    """The value changed after it was read; nothing was written. A function given to `optimistic` may raise it too."""

    def __init__(self, name: str = "", *, text: str = "", attempts: int = 1, found: str = "") -> None:
        self.name, self.attempts, self.found = name, attempts, found
        super().__init__(text or f"{name or 'it'} was changed by another writer in the meantime: read it again")


class RunFailed(LeaseholdError):
    """An earlier run of the key failed. With `on_failure="keep"` every caller gets this until the record expires."""

    def __init__(self, key: str, *, error: str, token: int | None = None) -> None:
        self.key, self.error, self.token = key, error, token
        super().__init__(f"{key} already ran and failed ({error}); it is not run again while the failure is kept")


class ConfigError(LeaseholdError, ValueError):
    """An argument, URL or name is invalid. Nothing was sent and nothing was changed."""


class AccessDenied(ConfigError):
    """The engine does not permit this user to do it. Raised as a `ConfigError`; the command line exits with 77."""
