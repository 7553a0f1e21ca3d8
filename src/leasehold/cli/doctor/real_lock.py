"""Tests a real lock, in a namespace of its own: rights, tokens, exclusion, hand-off and round trip."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median, quantiles
from typing import Final, TypeVar

from leasehold.blocking import Client
from leasehold.blocking.locks import Lease
from leasehold.cli.doctor.findings import NEVER_TESTED, NO_OWNER_CHECK, NO_TTL, Finding
from leasehold.config import REQUIREMENTS, advise_ttl
from leasehold.errors import AccessDenied, LeaseholdError, NotAcquired
from leasehold.model import Traits
from leasehold.runtime.base import Runtime, run_sync

T = TypeVar("T")

_PINGS: Final = 20
_MEASURE: Final = 5.0  # seconds after which no further round trip is measured
_TTL: Final = 10.0
_USUAL_TTL: Final = 30.0  # the default of a client
_HAND_OFF: Final = 1.0  # seconds within which a waiter must hold a lock that was released
_QUEUED: Final = 2.0  # seconds in which the waiter joins the queue
_POLL: Final = 0.02
_SLOW_ROUND_TRIP: Final = 0.25
_LONG_TTL: Final = 3600.0
_BREAK_REASON: Final = "leasehold doctor checks whether it may break a lock"


class _Failed(Exception):
    """A step failed, and the steps after it would mean nothing."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found)
        self.finding = finding


def try_lock(url: str | None, runtime: Runtime) -> Iterator[Finding]:
    namespace = f"doctor-{secrets.token_hex(4)}"
    with Client(url, namespace=namespace, ttl=_TTL, holder="leasehold doctor") as client:
        try:
            yield _measure(client, runtime)
            yield from _check_lock(client, runtime)
        except _Failed as failed:
            yield failed.finding
            return
        yield from describe_promises(client.traits)


def check_lifetimes(client: Client) -> Iterator[Finding]:
    """Held locks that a dead holder would keep for hours."""
    try:
        long = [each for each in client.inspect("") if each.state == "held" and each.left > _LONG_TTL]
    except LeaseholdError:  # the test of a real lock says why
        return
    if long:
        yield Finding(
            "ttl",
            "warning",
            f"{len(long)} held locks, such as {long[0].name}, expire only after an hour or more if their holder dies",
            "use a ttl of seconds or minutes: held leases are renewed anyway",
            red_flag=NO_TTL,
        )


def _measure(client: Client, runtime: Runtime) -> Finding:
    times: list[float] = []
    _step("connect", client.connect)
    end = runtime.now() + _MEASURE
    while len(times) < 2 or (len(times) < _PINGS and runtime.now() < end):
        began = runtime.now()
        _step("list locks", lambda: client.inspect("trial"))
        times.append(runtime.now() - began)
    middle, slow = median(times), quantiles(times, n=100)[98]
    text = f"{_milliseconds(middle)}, p99 {_milliseconds(slow)}"
    ttl = advise_ttl(0.0, slow)
    if slow > _SLOW_ROUND_TRIP:
        fix = f"use a ttl of at least {max(1.0, ttl):.0f} s, and run the program closer to the engine"
        return Finding("round trip", "warning", text, fix, "E8")
    return Finding("round trip", "ok", f"{text}: any ttl of {max(1.0, ttl):.0f} s or more will do")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.{1 if seconds >= 0.001 else 2}f} ms"


def _check_lock(client: Client, runtime: Runtime) -> Iterator[Finding]:
    lock = client.lock("trial")
    first = _step("acquire a lock", lambda: client.lock("trial", ttl=_USUAL_TTL).acquire(wait=0))
    try:
        yield from _check_session(client.traits, first.ttl)
        if _is_granted(client):
            raise _Failed(_broken_promise("a second holder was granted while the first one held the lock", "E1"))
        _step("renew a lock", first.renew)
        _step("list locks", lambda: client.inspect("trial"))
        yield from _check_hand_off(client, first, runtime)
    finally:
        with suppress(LeaseholdError):
            first.release()
    last = _step("acquire a lock", lambda: lock.acquire(wait=_HAND_OFF))
    try:
        if client.traits.fencing and not (first.token or 0) < (last.token or 0):
            raise _Failed(_broken_promise(f"token {last.token} came after token {first.token}", "E3"))
        yield from _check_break(client, last)
    finally:
        with suppress(LeaseholdError):
            last.release()
    yield Finding("lock", "ok", "taken, renewed, listed, refused to a second holder, released")


def _check_session(traits: Traits, granted: float) -> Iterator[Finding]:
    """Whether the servers let sessions live as long as leases usually do."""
    if traits.liveness == "session" and granted < _USUAL_TTL - 1:
        yield Finding(
            "session",
            "note",
            f"a lease with a ttl of {_USUAL_TTL:.0f} s got {granted:.1f} s: the servers end silent sessions then",
            f"raise session= in the URL, or maxSessionTimeout on the servers, to {_USUAL_TTL:.0f} s or more",
            "E8",
        )


def _is_granted(client: Client) -> bool:
    try:
        lease = _step("acquire a lock", lambda: client.lock("trial", reentrant=False).acquire(wait=0), NotAcquired)
    except NotAcquired:
        return False
    with suppress(LeaseholdError):
        lease.release()
    return True


def _check_hand_off(client: Client, first: Lease, runtime: Runtime) -> Iterator[Finding]:
    """A waiter in another thread must hold the lock soon after it was released."""
    granted: list[float] = []
    failures: list[LeaseholdError] = []
    ended = runtime.signal()

    async def wait_for_lock(_: Runtime) -> None:
        try:
            with (
                Client(client._core.config.url, namespace=client._core.options.namespace, ttl=_TTL) as waiter,
                waiter.lock("trial", wait=_TTL),
            ):
                granted.append(runtime.now())
        except LeaseholdError as error:
            failures.append(error)
        finally:
            ended.set()

    runtime.start_thread(wait_for_lock, "leasehold-doctor")
    queued_by = runtime.now() + _QUEUED
    while not failures and runtime.now() < queued_by and not _has_waiter(client):
        run_sync(runtime.sleep(_POLL))
    released = runtime.now()
    _step("release a lock", first.release)
    run_sync(ended.wait(_TTL + _QUEUED))
    if failures:
        raise _Failed(_refused("wait for a lock", failures[0]))
    if not granted:
        raise _Failed(_broken_promise("a waiter was not woken after the lock was released", "E4"))
    seconds = granted[0] - released
    if seconds > _HAND_OFF:
        yield Finding(
            "hand-off",
            "warning",
            f"a waiter held the lock {seconds:.1f} s after it was released",
            "check that notifications reach this client: a pooler or a proxy may hold them back",
            "E4",
        )
    else:
        yield Finding("hand-off", "ok", f"a waiter held the lock {_milliseconds(seconds)} after it was released")


def _has_waiter(client: Client) -> bool:
    return any(each.state == "waiting" for each in _step("list locks", lambda: client.inspect("trial")))


def _check_break(client: Client, lease: Lease) -> Iterator[Finding]:
    try:
        token = lease.token or 0
        broken = _step("break a lock", lambda: client.break_lock("trial", token=token, why=_BREAK_REASON), AccessDenied)
    except AccessDenied as denied:
        yield Finding("rights", "note", f"this user may not break locks: {denied}", "an operator needs that right")
        return
    if not broken:
        raise _Failed(_broken_promise("a held lock could not be broken", "E5"))
    yield Finding("rights", "ok", "take, renew, release, list, break")


def describe_promises(traits: Traits) -> Iterator[Finding]:
    """What this engine promises."""
    survives = {
        "nothing": "no restart of the engine",
        "restart": "a restart of the engine",
        "minority": "the loss of a minority of its servers",
    }
    words = [f"locks survive {survives[traits.survives]}"]
    words.append("first come, first served" if traits.fair else "waiters are served in no particular order")
    words.append("waiters are notified" if traits.push else "waiters poll")
    if traits.liveness == "session":
        words.append("a lock ends with its client's session")
    kept = [word for word, is_kept in REQUIREMENTS.items() if is_kept(traits)]
    words.append(f"locks may require {', '.join(kept) or 'nothing'}")
    yield Finding("promises", "ok", "; ".join(words))
    if not traits.push:
        yield Finding(
            "hand-off",
            "note",
            "this client gets no notifications: waiters poll, and a holder learns of a break at its next renewal",
            "behind a connection pooler, add listen_url=URL with the address of the server itself",
            "E4",
        )
    if not traits.fencing:
        yield Finding(
            "fencing",
            "warning",
            "this engine issues no fencing tokens: a paused holder cannot be refused at the resource",
            "use an engine with fencing for data that two writers would damage",
            "E3",
            NO_OWNER_CHECK,
        )


def _step(what: str, call: Callable[[], T], expected: type[LeaseholdError] | tuple[()] = ()) -> T:
    try:
        return call()
    except expected:
        raise
    except LeaseholdError as error:
        raise _Failed(_refused(what, error)) from error


def _refused(what: str, error: LeaseholdError) -> Finding:
    if isinstance(error, AccessDenied):
        fix = "grant the rights that docs/security.md lists for this engine: leasehold docs security"
        return Finding("rights", "danger", f"this user may not {what}: {error}", fix, "E5")
    return Finding("lock", "danger", f"could not {what}: {error}", "no program can use this engine as it is", "E5")


def _broken_promise(text: str, promise: str) -> Finding:
    return Finding("lock", "danger", text, "do not use this engine; please report it", promise, NEVER_TESTED)
