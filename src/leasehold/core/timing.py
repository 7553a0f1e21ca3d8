"""When to trust, when to renew, when to stop: every duration Leasehold decides, in one place.

All instants are on the clock of whoever calls. `asked_at` is always read *before* a request leaves (E8): the engine
starts its count later than that, so the caller's end comes first.
"""

from __future__ import annotations

from math import ceil, inf

from leasehold.errors import ConfigError

DRIFT = 0.01  # how far two honest clocks may run apart, as a share of the time measured
MIN_DRIFT = 0.002

RESERVATION_TTL = 3.0  # a waiter that was told its turn has this long to claim it
RESERVATION_PROBE = 1.0  # the next in line looks so soon whether somebody given a turn is still there to claim it
WAITER_TTL = 15.0  # a queued claim lapses so long after it was last heard of (E7)
HEARTBEAT_INTERVAL = 5.0  # the watchdog refreshes waiters, and the head of the line asks again unprompted, this often
MAX_SLEEP = 5.0  # no sleep is longer while something is held: sleeps do not count suspend, lives do
TERM_VISIBLE = 1.0  # a leader's term stays in view at least so long, however soon it resigns
WAKEUP_SLACK = 0.002  # looking for an end a hair too early would only cost a second look

NEVER = inf  # an end that nothing brings; a name, because `float("inf")` reads a text each time

_RETRY_SHARE = 0.15  # of the life left, between tries after a missed renewal
_MIN_RETRY = 0.01


def valid_until(asked_at: float, ttl: float) -> float:
    """Until when a grant may be trusted: the engine frees it no earlier, whatever the clocks do within drift."""
    drift = ttl * DRIFT
    return asked_at + ttl - (drift if drift > MIN_DRIFT else MIN_DRIFT)


def granted_ttl(ttl: float, min_ttl: float, ttl_step: float) -> float:
    """What an engine makes of a ttl, by its traits `min_ttl` and `ttl_step`."""
    return max(min_ttl, ceil(ttl / ttl_step) * ttl_step if ttl_step else ttl)


def renew_at(asked_at: float, ttl: float, jitter: float) -> float:
    """A third of the life, less up to a fifth of that: leases taken together are not all renewed together."""
    return asked_at + ttl / 3 * (1 - 0.2 * jitter)


def overdue_at(asked_at: float, ttl: float) -> float:
    """From here on a lease not yet renewed is AT_RISK."""
    return asked_at + ttl * 2 / 3


def retry_at(now: float, until: float, jitter: float) -> float:
    """After a miss: a share of the life left, so that tries get denser as the end comes nearer."""
    return now + max((until - now) * _RETRY_SHARE * (1 - 0.5 * jitter), _MIN_RETRY)


def renewal_deadline(now: float, until: float, call_timeout: float) -> float:
    """A third of the life left: a silent engine still leaves time for another try."""
    return now + min(max((until - now) / 3, _MIN_RETRY), call_timeout)


def call_deadline(now: float, call_timeout: float, ttl: float) -> float:
    """No call is worth more patience than the lease it is about would live."""
    return now + (call_timeout if call_timeout < ttl else ttl)


def recheck_interval(position: int | None) -> float:
    """How soon a waiter asks again unprompted. Deep in line the watchdog's batch does that for it: a thousand waiters
    must not ask one by one every few seconds. Its own look comes before its claim would lapse, should the batch fail.
    """
    return WAITER_TTL * 0.8 if position else HEARTBEAT_INTERVAL


def observe_interval(visible_for: float) -> float:
    """How often an observer looks for something that stays in view for `visible_for` seconds: twice, with time to
    spare."""
    return visible_for * 0.4


def advise_ttl(work: float, network: float, safety: float = 3.0) -> float:
    """A ttl, in seconds, that outlasts `safety` times the worst case between two renewals.

    work     the longest your program may not run at all: a pause of its garbage collector or its virtual machine, a C
             call that keeps the interpreter; for a lease that nobody renews, the longest the work takes
    network  the longest a call to the engine may take, a change of its leader or master included
    safety   how many such cases in a row the lease is to survive; at least 1

    Never less than a second. Longer costs one thing: a holder that dies keeps the name for that long.
    """
    if not (0 <= work < 1e9 and 0 <= network < 1e9 and 1 <= safety < 1e9):
        raise ConfigError("advise_ttl takes seconds of work and network, 0 or more, and a safety of at least 1")
    return max(1.0, safety * (work + network) / (1 - DRIFT))


def backoff(tries: int, base: float, maximum: float, jitter: float) -> float:
    """Exponential, with full jitter: for what can only be polled."""
    return min(maximum, base * 2.0 ** min(tries, 30)) * jitter
