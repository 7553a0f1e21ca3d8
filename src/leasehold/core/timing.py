"""When to trust, when to renew, when to stop: every duration Leasehold decides, in one place.

All instants are on the caller's clock. `asked_at` is always read *before* a request is sent (E8): the engine starts
counting later, so the lease ends at the caller first.
"""

from __future__ import annotations

from math import ceil, inf

from leasehold.errors import ConfigError

DRIFT = 0.01  # how far two correct clocks may drift apart, as a share of the time measured, unless a client sets it
MIN_DRIFT = 0.002
MAX_DRIFT = 0.5  # more would leave no time for a renewal

RESERVATION_TTL = 3.0  # seconds a waiter has to claim its reservation
RESERVATION_PROBE = 1.0  # seconds until the next waiter re-checks whether a reservation's client is still reachable
WAITER_TTL = 15.0  # a queued claim expires this many seconds after its last attempt or heartbeat (E7)
HEARTBEAT_INTERVAL = 5.0  # seconds between a waiter's heartbeats, and between unprompted attempts of the queue's head
STABLE_AFTER = 5.0  # seconds: if a connection or thread lasted this long, the pause before the next one is the shortest
MAX_SLEEP = 5.0  # longest sleep while a lease is held: a sleep does not count a suspend of the machine, a ttl does
TERM_VISIBLE = 1.0  # a leader's term stays visible for at least this many seconds, even if the leader resigns sooner
WAKEUP_SLACK = 0.002  # re-checking slightly too early would only cost a second re-check

NEVER = inf  # the end of what does not expire; a constant, because `float("inf")` parses a string each time

_POLL_INTERVAL = 0.2  # seconds between the attempts of a queue's head that no wake-up reaches
_MAX_POLL_INTERVAL = 8.0  # with jitter still below WAITER_TTL: a waiter keeps its position without a watchdog
_MIN_OVERLOAD_PAUSE = 0.05
_MAX_OVERLOAD_PAUSE = 8.0
_FAR_BEHIND = 100  # position of a waiter that needs no attempt while its heartbeats are confirmed
_MAX_UNATTEMPTED = 60.0  # seconds after which it attempts nevertheless
_RETRY_SHARE = 0.15  # of the life left, between retries after a missed renewal
_MIN_RETRY = 0.01
_SLOW = 1 / 16  # of the ttl: a renewal that opens a connection takes up to six round trips
_ROUND_TRIPS = 3  # to a server without a connection: to connect, for TLS, and for the call
_MAX_SERVER_SHARE = 0.9  # of the time left: if the server is silent, the rest is for the others
_MIN_ATTEMPT = 0.25  # seconds that an attempt gets however soon `wait` is over: a shorter one may never succeed


def valid_until(asked_at: float, ttl: float, drift: float = DRIFT) -> float:
    """Until when a grant may be trusted: the engine does not end it earlier if the clocks stay within the drift."""
    margin = ttl * drift
    return asked_at + ttl - (margin if margin > MIN_DRIFT else MIN_DRIFT)


def trusted_until(asked_at: float, ttl: float, drift: float, strict: bool) -> float:
    """The same for a strict lease: it ends as soon as its renewal is overdue."""
    until = valid_until(asked_at, ttl, drift)
    return min(until, overdue_at(asked_at, ttl)) if strict else until


def ttl_to_last(seconds: float, drift: float, strict: bool) -> float:
    """The ttl of a grant that can be trusted for `seconds` from when it was asked for."""
    ttl = max(seconds / (1 - drift), seconds + MIN_DRIFT)
    return max(ttl, seconds * 3 / 2) if strict else ttl


def granted_ttl(ttl: float, min_ttl: float, ttl_step: float) -> float:
    """The ttl that an engine with these traits grants when asked for `ttl`."""
    return max(min_ttl, ceil(ttl / ttl_step) * ttl_step if ttl_step else ttl)


def renew_at(asked_at: float, ttl: float, jitter: float) -> float:
    """After a third of the ttl, less up to a fifth of that: leases acquired together are not all renewed together."""
    return asked_at + ttl / 3 * (1 - 0.2 * jitter)


def overdue_at(asked_at: float, ttl: float) -> float:
    """From then on a lease that was not renewed is AT_RISK."""
    return asked_at + ttl * 2 / 3


def retry_at(now: float, until: float, jitter: float) -> float:
    """When to retry a missed renewal: after a share of the life left, so retries get denser towards the end."""
    return now + max((until - now) * _RETRY_SHARE * (1 - 0.5 * jitter), _MIN_RETRY)


def is_slow(took: float, ttl: float) -> bool:
    """Whether an answer took so long that renewals need more time than usual."""
    return took > ttl * _SLOW


def renewal_deadline(now: float, until: float, call_timeout: float, slow: bool = False) -> float:
    """Half of the life left: if the engine does not answer, there is time for another try. Two thirds if renewals are
    slow: a shorter second try would not succeed either."""
    share = 2 / 3 if slow else 1 / 2
    return now + min(max((until - now) * share, _MIN_RETRY), call_timeout)


def server_share(left: float, servers: int, last_answer: float) -> float:
    """How many of the seconds left to wait for the next of several servers.

    An equal share, but longer if the last answer took long: in a slow network no server could answer within its share,
    and each new connection would be given up in turn. A tenth of the time is always left for the others: enough after
    one slow answer in a fast network.
    """
    return max(left / servers, min(last_answer * _ROUND_TRIPS, left * _MAX_SERVER_SHARE))


def call_deadline(now: float, call_timeout: float, ttl: float) -> float:
    """A call waits at most `call_timeout`, and never longer than the ttl of its lease."""
    return now + (call_timeout if call_timeout < ttl else ttl)


def bounded_attempt(now: float, latest: float, wait_deadline: float) -> float:
    """The deadline of an attempt that must not outlast the caller's `wait` while the engine is silent."""
    return min(latest, max(wait_deadline, now + _MIN_ATTEMPT))


def recheck_interval(position: int | None) -> float:
    """How soon a waiter attempts again without a notification.

    Behind the head of the queue the watchdog's batch sends the heartbeats, because a thousand waiters must not attempt
    one by one every few seconds. If the batch fails, the waiter's own attempt still comes before its claim expires.
    """
    return WAITER_TTL * 0.8 if position else HEARTBEAT_INTERVAL


def needs_no_attempt(position: int | None, attempted_at: float, kept_at: float, now: float) -> bool:
    """Whether a waiter far from the head of the queue can do without the attempt that `recheck_interval` asks for: the
    engine has confirmed its heartbeat, sent at `kept_at`. Ten thousand waiters would attempt 800 times a second, which
    is all that some engines can do. But now and then it attempts, because its position may be out of date."""
    if position is None or position < _FAR_BEHIND:
        return False
    return now < min(kept_at + recheck_interval(position), attempted_at + _MAX_UNATTEMPTED)


def poll_interval(position: int | None, polls: int, jitter: float) -> float:
    """How long a waiter that no wake-up reaches waits before it attempts again.

    The head of the queue attempts every 0.2 s, so that a hand-off stays quick. Each waiter ahead makes the interval a
    quarter longer, but not longer than the 0.2 s per waiter ahead that the queue takes to advance, and at most 8 s: a
    thousand waiters of a name attempt 150 times a second in all. A waiter that does not know its position doubles its
    interval with each of its polls. `jitter`, in [0, 1), moves both by up to a half, so that waiters that came together
    do not attempt together.
    """
    factor = 2.0 ** min(polls, 30) if position is None else min(1.25 ** min(position, 30), 1 + position)
    return min(_MAX_POLL_INTERVAL, _POLL_INTERVAL * factor) * (0.5 + jitter)


def outage_pause(tries: int, jitter: float) -> float:
    """How long an acquire with `on_unavailable="wait"` pauses after its n-th try without an answer."""
    return backoff(tries, 0.05, 2.0, 0.5 + jitter / 2)


def overload_pause(tries: int, retry_in: float, jitter: float) -> float:
    """How long an acquire pauses after the n-th refusal by a lock server: at least as long as the server says, and with
    jitter, or all refused callers would come back at the same moment. A server that says 0 gets no flood of calls."""
    base = max(retry_in, _MIN_OVERLOAD_PAUSE)
    return max(retry_in, backoff(tries, base, _MAX_OVERLOAD_PAUSE, 0.5 + jitter / 2))


def observe_interval(visible_for: float) -> float:
    """How often an observer polls for something that stays visible for `visible_for` seconds: twice, with a margin."""
    return visible_for * 0.4


def check_drift(drift: float) -> float:
    if isinstance(drift, bool) or not isinstance(drift, int | float) or not 0 <= drift <= MAX_DRIFT:
        raise ConfigError(
            f"drift must be a share between 0 and {MAX_DRIFT}, such as {DRIFT} for one percent, not {drift!r}"
        )
    return drift


def backoff(tries: int, base: float, maximum: float, jitter: float) -> float:
    """Exponential backoff with full jitter, for retries and polling."""
    return min(maximum, base * 2.0 ** min(tries, 30)) * jitter
