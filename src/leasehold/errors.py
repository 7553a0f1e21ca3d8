"""Every error that Leasehold raises, and what it means for the caller.

    LeaseholdError
    ├── NotAcquired   (also TimeoutError)   another claim holds the name; wait longer, or try later
    │   └── Deadlocked                      its holder waits, directly or not, for what this caller holds
    ├── LeaseLost                           stop working on what the lock protects
    ├── Unavailable                         the engine did not answer; the outcome is unknown
    ├── Unsupported                         this engine cannot do what was asked; refused when built
    ├── Mismatch                            the name is in use with another kind or limit
    ├── SelfDeadlock  (also RuntimeError)   this thread or task already holds the name
    ├── StaleToken                          a resource refused a token older than one it has seen
    ├── Conflict                            another writer changed the value; read and decide again
    ├── RunFailed                           an earlier run failed, and its failure is kept
    └── ConfigError   (also ValueError)     a bad argument, URL or name; nothing was done

Each error has fields, shows them in its text, and survives pickling. Serialisers that keep no more than the class and
`args`, such as Celery's JSON, keep the fields too. No error carries a claim's secret id or a URL's password.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

from leasehold.model import Holder, Reason

__all__ = [
    "ConfigError",
    "Conflict",
    "Deadlocked",
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


_MAX_REFUSALS = 10  # of names, that the text of an error of `any_of` lists


def escape(text: str) -> str:
    """Escape what is not printable: control characters, bidirectional controls, line separators, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "replace").decode() for char in text)


class LeaseholdError(Exception):
    """The base class of every error that Leasehold raises."""

    _text: str | None = None

    def __init__(self, text: str = "", *fields: object) -> None:
        """`fields`: what to pass to the class, in order, for an equal error. Default: the text."""
        super().__init__(text)
        if fields:
            self._text, self.args = text, fields

    def __str__(self) -> str:
        """On one line and printable: it may have a name or label that another program chose."""
        return escape(super().__str__() if self._text is None else self._text)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (_class_for_others(type(self)), self.args, self.__dict__.copy())

    def __copy__(self) -> Self:
        """In this process it stays what it is: an engine's own subclass decides what its callers do."""
        return _rebuild(type(self), self.args, self.__dict__.copy())


def _class_for_others(kind: type[LeaseholdError]) -> type[LeaseholdError]:
    """A class of this module, which all programs with Leasehold have: an engine's own subclass may need a driver."""
    if not kind.__module__.startswith("leasehold."):
        return kind  # of the program itself
    return next(base for base in kind.__mro__ if base.__module__ == __name__)


def for_other_processes(error: LeaseholdError) -> LeaseholdError:
    """The error as another process gets it if it is pickled. For those who write down no more than its class and
    `args`."""
    kind = _class_for_others(type(error))
    return error if kind is type(error) else _rebuild(kind, error.args, error.__dict__.copy())


E = TypeVar("E", bound=LeaseholdError)


def _rebuild(kind: type[E], args: tuple[object, ...], attributes: dict[str, object]) -> E:
    error = kind.__new__(kind)  # the attributes may be more than its __init__ knows, such as notes
    error.args = args
    error.__dict__.update(attributes)
    return error


class NotAcquired(LeaseholdError, TimeoutError):
    """The name did not become free within `wait`. Says who holds it, as far as the engine knows.

    `refusals`: if the lock was that of `any_of`, the errors of its names, one each."""

    def __init__(
        self,
        name: str,
        holder: Holder | None = None,
        token: int | None = None,
        left: float | None = None,
        position: int | None = None,
        waited: float = 0.0,
        refusals: Sequence[NotAcquired | Sequence[Any]] = (),
    ) -> None:
        """`refusals`: errors, or the `args` of each."""
        self.name, self.token, self.left, self.position, self.waited = name, token, left, position, waited
        self.refusals = tuple(each if isinstance(each, NotAcquired) else NotAcquired(*each) for each in refusals)
        self.holder: str | None
        self.host: str | None
        self.pid: int | None
        self.purpose: str | None
        self.holder, self.host, self.pid, self.purpose = holder or (None, None, None, None)
        what = "them" if refusals else "it"
        text = self.situation() + ("" if waited > 0 else f"; pass wait=SECONDS to queue for {what}")
        super().__init__(text, name, holder, token, left, position, waited, [each.args for each in self.refusals])

    def situation(self) -> str:
        """Who holds the name, with everything an operator needs to find that process; without advice."""
        if self.refusals:
            held = "; ".join(refusal.holding() for refusal in self.refusals[:_MAX_REFUSALS])
            more = len(self.refusals) - _MAX_REFUSALS
            text = f"none of {len(self.refusals)} names is free: {held}" + (f"; and {more} more" if more > 0 else "")
            return text + (f"; gave up after {self.waited:.1f} s" if self.waited > 0 else "")
        text = self.holding()
        if self.waited > 0:
            text += f"; gave up after {self.waited:.1f} s"
            if self.position is not None:
                text += f" {describe_position(self.position)}"
        return text

    def holding(self) -> str:
        """Who holds the name."""
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
        return f"{self.name} {who}" + (f" ({', '.join(facts)})" if facts else "")


def describe_position(position: int) -> str:
    return f"at position {position} in the queue ({f'{position} ahead' if position else 'next'})"


class Deadlocked(NotAcquired):
    """The caller waited in a cycle, for ever. For locks with `on_deadlock="raise"`. `cycle` describes it; `names` are
    those that its members wait for. Release what you hold, and try again."""

    def __init__(self, name: str, cycle: str, names: Sequence[str] = ()) -> None:
        self.cycle, self.names = cycle, tuple(names)
        super().__init__(name)
        self.args = (name, cycle, self.names)
        self._text = (
            f"waiting for {name} is a deadlock: {cycle}; release what this thread or task holds and try again, or take "
            "all names at once with multilock"
        )


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
        "taken_over": "another process took it over, or the time to take it over has passed",
    }

    def __init__(self, name: str, reason: Reason = "unknown", token: int | None = None) -> None:
        self.name, self.reason, self.token = name, reason, token
        with_token = f" (token {token})" if token else ""
        text = f"the lease of {name}{with_token} is lost: {self.EXPLANATIONS[reason]}; stop the work it protects"
        super().__init__(text, name, reason, token)


class Unavailable(LeaseholdError):
    """The engine gave no usable answer. The outcome is unknown: the call may or may not have taken effect.

    `retry_in`: seconds until the next try makes sense, as the circuit breaker or a lock server says; else None.

    `no_majority`: some servers answered, and without a majority they decide nothing: they are cut off from the others,
    the others are down, or an election is under way. False if no server answered, or if the engine cannot tell."""

    def __init__(
        self,
        text: str,
        engine: str = "",
        seconds: float | None = None,
        retry_in: float | None = None,
        no_majority: bool = False,
    ) -> None:
        self.engine, self.seconds, self.retry_in, self.no_majority = engine, seconds, retry_in, no_majority
        super().__init__(text, text, engine, seconds, retry_in, no_majority)


class NotSent(Unavailable):
    """The engine was not asked, by this process or by any lock server, so nothing must be undone."""


class Overloaded(NotSent):
    """A lock server refused the call because of its limits, before it asked its engine. Callers that may wait try
    again after `retry_in` seconds, until their `wait` is over."""


class Crowded(NotSent):
    """The engine works, but the deadline passed while other calls of this client were waiting to be sent."""


class Reentered(Unavailable):
    """A finaliser or signal handler called the engine while its own thread was inside that engine.

    Waiting there would never end. As after any `Unavailable`, the call is retried later where that is possible.
    """

    def __init__(self) -> None:
        super().__init__("called from a finaliser or signal handler while the same thread was inside the engine")
        self.args = ()


class TransactionOpen(Unavailable):
    """The engine answered: a transaction of the caller, which is still open, decides about the lease. As after any
    `Unavailable`, the release is retried later."""


class ListingTooLong(Unavailable):
    """More claims are live than a client lists. Nothing is wrong with the engine, and the same call fails again."""


class Refused(Unavailable):
    """The engine answered a renewal or a release: it does not permit it, or finds it invalid. The `ConfigError` is its
    `__cause__`. The watchdog goes on trying, as after any `Unavailable`, because a right may come back."""


def for_caller(error: Unavailable) -> LeaseholdError:
    """What to raise in a caller who renews or releases: why the engine refused it."""
    cause = error.__cause__
    return cause if isinstance(error, Refused) and isinstance(cause, LeaseholdError) else error


class Unsupported(LeaseholdError):
    """The engine, as configured, does not promise what the lock needs. Raised when the lock is built."""

    def __init__(self, text: str, engine: str = "", missing: Sequence[str] = ()) -> None:
        self.engine, self.missing = engine, tuple(missing)
        super().__init__(text, text, engine, self.missing)


class Mismatch(LeaseholdError):
    """The name is in use with another kind or limit: two callers disagree about what it is."""

    def __init__(self, name: str, wanted: str, found: str, advice: str = "") -> None:
        self.name, self.wanted, self.found = name, wanted, found
        advice = advice or "use one kind and one limit for a name, or wait until it is idle"
        text = f"{name} is in use as a {found}, this call wants a {wanted}: {advice}"
        super().__init__(text, name, wanted, found, advice)


class SelfDeadlock(LeaseholdError, RuntimeError):
    """This thread or task already holds the name, so waiting for it would never end."""

    def __init__(self, name: str, token: int | None = None, why: str = "") -> None:
        self.name, self.token = name, token
        with_token, reason = f" (token {token})" if token else "", f": {why}" if why else ""
        super().__init__(f"{name} is already held by this thread or task{with_token}{reason}", name, token, why)


class StaleToken(LeaseholdError):
    """A protected resource has seen a higher token, so the lease with this token is over. Nothing was written."""

    def __init__(self, resource: str, token: int, highest: int, slot: int | None = None) -> None:
        self.resource, self.token, self.highest, self.slot = resource, token, highest, slot
        where = resource if slot is None else f"{resource}, slot {slot},"
        text = f"{where} refused token {token}: it has seen {highest}; the lease with the lower token is over"
        super().__init__(text, resource, token, highest, slot)


class Conflict(LeaseholdError):
    """The value changed after it was read; nothing was written. A function given to `optimistic` may raise it too."""

    def __init__(self, name: str = "", text: str = "", attempts: int = 1, found: str = "") -> None:
        self.name, self.attempts, self.found = name, attempts, found
        text = text or f"{name or 'it'} was changed by another writer in the meantime: read it again"
        super().__init__(text, name, text, attempts, found)


class RunFailed(LeaseholdError):
    """An earlier run of the key failed. With `on_failure="keep"` every caller gets this until the record expires."""

    def __init__(self, key: str, error: str, token: int | None = None) -> None:
        self.key, self.error, self.token = key, error, token
        text = f"{key} already ran and failed ({error}); it is not run again while the failure is kept"
        super().__init__(text, key, error, token)


class ConfigError(LeaseholdError, ValueError):
    """An argument, URL or name is invalid. Nothing was sent and nothing was changed."""


class AccessDenied(ConfigError):
    """The engine does not permit this user to do it. Raised as a `ConfigError`; the command line exits with 77."""

    _nothing_done = False  # True: certainly, so nothing must be undone
