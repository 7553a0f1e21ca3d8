"""The Lua scripts compared with core/lock_state.py: same verbs at the same times, same answers and wake-ups.

The test replaces one line of the scripts, which reads the clock, and expires keys itself when it advances the clock.
Real subscriptions decide which clients can be notified, and the test reads the notifications from them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from copy import deepcopy

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.rigs import with_own_server
from harness.rigs.redis import RedisRig
from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import HELD, PASSED, WAITING, Context, Notification, TokenCounter
from leasehold.core.timing import RESERVATION_PROBE, WAITER_TTL
from leasehold.engines.redis import protocol, scripts
from leasehold.engines.redis.protocol import RedisRequests, RedisScripts, lock_keys
from leasehold.engines.redis.scripts import MICROS, PubSubCommands, Script
from leasehold.engines.redis.server import encode_command
from leasehold.errors import Mismatch
from leasehold.model import NO_MIN_HOLD, Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_lock_state

REAL_CLOCK = "redis.call('TIME')"
FAKE_CLOCK = "redis.call('HMGET', 'clock', 's', 'us')"
ID_HASHES = [letter * 32 for letter in "abcde"]
KEYS = lock_keys("ns", "name")


class RawConnection:
    """A connection to the server without the engine."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.reader = hiredis.Reader()

    def ask(self, *arguments):
        return self.send(encode_command(*arguments))

    def send(self, packed: bytes):
        self.sock.sendall(packed)
        return self.read()

    def read(self):
        while (reply := self.reader.gets()) is False:
            self.reader.feed(self.sock.recv(65536))
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply


class PureLockState(LockState):
    """Like attempt.lua, schedules the first scan for expired waiters when the first waiter queues."""

    def _add_entry(self, now, claim, client):
        if not any(entry.state in (WAITING, PASSED) for entry in self.entries.values()):
            self._next_waiter_scan = now + WAITER_TTL
        return super()._add_entry(now, claim, client)


class ModelComparison:
    """One clock, clients that are subscribed or not, and the same name in the scripts and in the model."""

    def __init__(self, port: int) -> None:
        self.connection, self.subscriber = RawConnection(port), RawConnection(port)
        self.requests = RedisRequests(PubSubCommands(), "")
        self.requests.scripts = RedisScripts(*map(self.with_fake_clock, self.requests.scripts))
        self.requests.set_client("")  # encodes the requests with these scripts
        self.name = self.requests.name_keys("ns", "name")
        self.reset()

    def with_fake_clock(self, script: Script) -> Script:
        text = script.text.decode()
        assert text.count(REAL_CLOCK) == 1
        fake_clock_script = scripts.make_script(script.name, text.replace(REAL_CLOCK, FAKE_CLOCK))
        self.connection.ask("SCRIPT", "LOAD", fake_clock_script.text)
        return fake_clock_script

    def requests_for(self, claim: Claim) -> RedisRequests:
        """The requests of the client that made this claim."""
        self.requests.set_client(claim.id_hash)
        return self.requests

    def reset(self) -> None:
        self.connection.ask("FLUSHALL")
        # So far ahead of the server's clock that the server expires no key itself.
        self.now, self.counter, self.state = 4_000_000_000.0, TokenCounter(), None
        self.own_rechecks: dict[str, float] = {}  # by id hash
        self.write_clock()
        self.unsubscribed = set(ID_HASHES)
        self.subscriber.sock.sendall(encode_command("UNSUBSCRIBE"))
        while self.subscriber.read()[2]:  # subscriptions left
            continue
        for id_hash in ID_HASHES:
            self.subscribe(id_hash)

    def write_clock(self) -> None:
        self.connection.ask("HSET", "clock", "s", int(self.now), "us", round(self.now % 1 * MICROS))

    def advance_clock(self, seconds: float) -> None:
        self.now += seconds
        self.write_clock()
        for key in KEYS[1:]:
            end = self.connection.ask("PEXPIRETIME", key)
            keeps_limit = key == KEYS[1] and self.state is not None and self.state.limit_set
            assert (end == -1) == keeps_limit, f"{key}: PEXPIRETIME {end}"
            if 0 < end <= self.now * 1000:
                self.connection.ask("DEL", key)

    def subscribe(self, id_hash: str) -> None:
        if id_hash in self.unsubscribed:
            self.unsubscribed.discard(id_hash)
            self.subscriber.ask("SUBSCRIBE", f"lh1:c:{id_hash}")

    def unsubscribe(self, id_hash: str) -> None:
        if id_hash not in self.unsubscribed:
            self.unsubscribed.add(id_hash)
            self.subscriber.sock.sendall(encode_command("UNSUBSCRIBE", f"lh1:c:{id_hash}"))
            assert self.subscriber.read()[0] == b"unsubscribe"

    def read_notifications(self):
        """The notifications sent since the last call."""
        notifications: list[Notification] = []
        self.subscriber.sock.sendall(encode_command("PING", "drained"))
        while True:
            message = self.subscriber.read()
            if message in ([b"pong", b"drained"], b"drained"):
                return notifications
            if message[0] == b"message":
                kind, delay, key, id_hash = message[2].split(b" ", 3)
                assert protocol.parse_key(key.decode()) == ("ns", "name")
                client = message[1].decode().removeprefix("lh1:c:")
                notifications.append(Notification(client, kind.decode(), id_hash.hex(), int(delay) / MICROS))

    def run_model(self, verb, kind="lock", limit=1):
        context = Context(
            self.now,
            lambda: self.counter.next(round(self.now * MICROS)),
            lambda client: client not in self.unsubscribed,
        )
        state = self.state or PureLockState(self.now, kind, limit)
        try:
            answer = verb(state, context)
        except Mismatch as error:
            answer = str(error), []
        self.state = None if state.empty and not state.limit_set else state
        return answer[0], self.without_own_rechecks(answer[1])

    def attempt(self, claim: Claim):
        reply = self.connection.send(self.requests_for(claim).attempt(self.name, claim))
        # Until then the client attempts again by itself: a repeated attempt does not promise that any more.
        self.own_rechecks[claim.id_hash] = self.now + RESERVATION_PROBE if protocol.must_recheck(reply) else 0.0
        try:
            return protocol.decode_attempt(claim, reply)
        except Mismatch as error:
            return str(error)

    def without_own_rechecks(self, notifications: list[Notification]) -> list[Notification]:
        """What the scripts send of these: a head that re-checks by itself, and early enough, is not notified."""
        needed = []
        for each in notifications:
            own_recheck = self.own_rechecks.get(each.id_hash, 0.0)
            if each.kind == "recheck" and self.now < own_recheck <= self.now + each.seconds + 1e-6:
                probe_lock_state.set_notified_head(self.state, each.id_hash, own_recheck)
            else:
                needed.append(each)
        return needed

    def check_inspect(self) -> None:
        """`inspect` shows the same holdings as the model, and changes nothing."""
        holdings = protocol.decode_holdings("ns", "name", self.connection.send(self.requests.inspect(self.name)))
        state = deepcopy(self.state) or LockState(self.now)
        state.expire(self.now)
        assert round_times(holdings) == round_times(list(state.holdings("ns", "name", self.now)))


def round_times(value):
    """Round times to 10 microseconds: the model computes with float seconds."""
    if isinstance(value, float):
        return round(value * MICROS / 10)
    if isinstance(value, Grant | Busy | Alive | Gone | Notification):
        return type(value).__name__, [round_times(item) for item in value]
    if isinstance(value, list | tuple):
        return [round_times(item) for item in value]
    if hasattr(value, "fingerprint"):
        return [round_times(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


def claim(id_hash: str, **fields) -> Claim:
    fields = {"ttl": 10.0, "queue": True} | fields
    return Claim("ns", "name", f"secret {id_hash}", id_hash, Holder(f"holder {id_hash}", "h", 1, "p"), **fields)


@pytest.fixture(scope="module")
def comparison() -> Iterator[ModelComparison]:
    comparison = ModelComparison(rig_or_skip(with_own_server(RedisRig)).server.port)
    yield comparison
    for connection in (comparison.connection, comparison.subscriber):
        connection.sock.close()


id_hashes = st.sampled_from(ID_HASHES)
shapes = st.sampled_from(
    [{}, {}, {"mode": "shared"}, {"mode": "shared"}, {"delay": 2.0}, {"delay": 2.0}, {"min_hold": 4.0}]
)
semaphores = st.sampled_from([{}, {"delay": 2.0}]).map(lambda more: {"kind": "semaphore", "limit": 2, **more})
attempts = st.tuples(st.just("attempt"), id_hashes, st.just(True), shapes, st.sampled_from([1.0, 10.0]))
renewal = st.tuples(id_hashes, st.sampled_from([True, True, False]), st.sampled_from([1.0, 10.0, 10.0]))
renewals = st.tuples(st.just("renew"), st.one_of(st.tuples(renewal), st.lists(renewal, min_size=1, max_size=3)))
time_steps = st.tuples(st.just("pass"), st.sampled_from([0.5, 0.5, 1.0, 2.5, 3.0, 4.0, 8.0, 14.5, 16.0]))
limits = st.tuples(st.just("set_limit"), st.sampled_from([None, 1, 2, 3]))
steps = st.lists(
    st.one_of(
        attempts,
        attempts,
        st.tuples(st.just("attempt"), id_hashes, st.just(False), shapes, st.sampled_from([1.0, 10.0])),
        renewals,
        renewals,
        st.tuples(st.just("release"), id_hashes, st.booleans(), st.sampled_from([True, True, False])),
        st.tuples(st.just("break"), id_hashes),
        limits,
        st.tuples(st.just("decline"), id_hashes, st.sampled_from([True, True, False])),
        time_steps,
        time_steps,
        st.tuples(st.just("unreachable"), id_hashes),
        st.tuples(st.just("hears"), id_hashes),
    ),
    min_size=15,
    max_size=60,
)


@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=40)
def test_scripts_agree_with_the_pure_model(kind: str, data, comparison: ModelComparison) -> None:
    check_agreement(kind, data, comparison)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=3000)
def test_scripts_agree_with_the_pure_model_over_many_examples(kind: str, data, comparison: ModelComparison) -> None:
    check_agreement(kind, data, comparison)


def check_agreement(kind: str, data, comparison: ModelComparison) -> None:
    comparison.reset()
    tokens: dict[str, int] = {}
    for step in data.draw(steps):
        run_both(comparison, step, tokens, kind, data)
        comparison.check_inspect()
    run_both(comparison, ("set_limit", None), tokens, kind, data)
    # Without further calls, only the counter remains.
    comparison.advance_clock(1000.0)
    assert set(comparison.connection.ask("KEYS", "*")) <= {b"clock", KEYS[0].encode()}


def run_both(comparison: ModelComparison, step, tokens: dict[str, int], kind: str, data) -> None:
    what, *args = step
    if what == "pass":
        comparison.advance_clock(args[0])
        return
    if what == "unreachable":
        comparison.unsubscribe(args[0])
        return
    if what == "hears":
        comparison.subscribe(args[0])
        return
    if what == "attempt":
        id_hash, queue, shape, ttl = args
        if kind == "semaphore" or (kind == "either" and data.draw(st.booleans())):
            shape = data.draw(semaphores)
        current_claim = claim(id_hash, queue=queue, ttl=ttl, **shape)
        actual = comparison.attempt(current_claim)
        expected, notifications = comparison.run_model(
            lambda state, context: state.attempt(context, current_claim, id_hash),
            current_claim.kind,
            current_claim.limit,
        )
        if isinstance(actual, Grant):
            tokens[id_hash] = actual.token
    elif what == "renew":
        claims = [
            claim(id_hash, token=tokens.get(id_hash, 7) if held else 0, ttl=ttl) for id_hash, held, ttl in args[0]
        ]
        name_expired = not comparison.connection.ask("EXISTS", KEYS[1])  # then the server knows no claim
        reply = comparison.connection.send(comparison.requests.renew(comparison.name, claims))
        actual = protocol.decode_renewals(claims, reply)
        expected, notifications = [], []
        expired_id_hashes = {} if comparison.state is None else comparison.state.entries
        expired_id_hashes = {
            p.id_hash for p in expired_id_hashes.values() if p.state == 2 and p.expires_at <= comparison.now
        }
        for current_claim in claims:
            answer, new_notifications = comparison.run_model(
                lambda state, context, current_claim=current_claim: state.renew(context, current_claim)
            )
            # The script answers all claims of a batch as of the same instant.
            entry = comparison.state and comparison.state.entries.get(current_claim.id_hash)
            if isinstance(answer, Alive) and entry.state == HELD and not current_claim.token:
                answer = answer._replace(position=actual[len(expected)].position)  # without meaning for a holder
            if isinstance(answer, Gone):
                answer = Gone(
                    "expired" if current_claim.id_hash in expired_id_hashes and not name_expired else "unknown"
                )
            expected.append(answer)
            notifications += new_notifications
    elif what == "release":
        id_hash, keep, held = args
        current_claim = claim(id_hash, min_hold=0.0 if keep else NO_MIN_HOLD)._replace(id="secret" if held else "")
        actual = bool(
            comparison.connection.send(comparison.requests_for(current_claim).release(comparison.name, current_claim))
        )
        expected, notifications = comparison.run_model(
            lambda state, context: state.release(context, id_hash, keep, held)
        )
    elif what == "set_limit":
        actual = bool(comparison.connection.send(comparison.requests.set_limit(comparison.name, args[0])))
        expected, notifications = comparison.run_model(lambda state, context: state.set_limit(context, args[0]))
    elif what == "decline":
        id_hash, own = args
        client = id_hash if own else ID_HASHES[0]
        request = comparison.requests_for(claim(client)).decline(comparison.name, claim(id_hash))
        actual = bool(comparison.connection.send(request))
        expected, notifications = comparison.run_model(lambda state, context: state.decline(context, id_hash, client))
    else:
        token = tokens.get(args[0], 7)
        actual = bool(comparison.connection.send(comparison.requests.break_(comparison.name, token)))
        expected, notifications = comparison.run_model(lambda state, context: state.break_(context, token))
    assert round_times(actual) == round_times(expected), step
    delivered = [word for word in notifications if word.client not in comparison.unsubscribed]
    assert round_times(comparison.read_notifications()) == round_times(delivered), step


def test_release_costs_the_same_with_3_as_with_200_waiters(comparison: ModelComparison) -> None:
    def commands() -> int:
        stats = comparison.connection.ask("INFO", "commandstats").decode().splitlines()
        counts = [int(line.partition("calls=")[2].split(",")[0]) for line in stats if line.startswith("cmdstat_")]
        return sum(counts)

    costs = []
    for waiter_count in (3, 200):
        comparison.reset()
        for number in range(waiter_count):
            comparison.subscriber.ask("SUBSCRIBE", f"lh1:c:{number:032x}")
            comparison.attempt(claim(f"{number:032x}"))
        comparison.read_notifications()
        comparison.advance_clock(RESERVATION_PROBE)  # no waiter re-checks by itself any more
        before = commands()
        first_claim = claim(f"{0:032x}")
        comparison.connection.send(comparison.requests_for(first_claim).release(comparison.name, first_claim))
        costs.append(commands() - before)
        assert [notification.kind for notification in comparison.read_notifications()] == ["reserved", "recheck"]
        comparison.subscriber.sock.sendall(encode_command("UNSUBSCRIBE"))
        while comparison.subscriber.read()[2]:
            continue
    assert costs[0] == costs[1] < 40


def test_new_head_is_notified_unless_it_rechecks_by_itself_in_time(comparison: ModelComparison) -> None:
    for seconds, kinds in ((RESERVATION_PROBE / 2, ["reserved"]), (RESERVATION_PROBE, ["reserved", "recheck"])):
        comparison.reset()
        holder, first, second = (claim(id_hash) for id_hash in ID_HASHES[:3])
        for each in (holder, first, second):
            comparison.attempt(each)
        comparison.read_notifications()
        comparison.advance_clock(seconds)
        comparison.connection.send(comparison.requests_for(holder).release(comparison.name, holder))
        assert [notification.kind for notification in comparison.read_notifications()] == kinds


def test_waiter_without_subscription_learns_so_as_it_joins_behind_others(comparison: ModelComparison) -> None:
    comparison.reset()
    holder, first, second = (claim(id_hash) for id_hash in ID_HASHES[:3])
    for each in (holder, first):
        comparison.attempt(each)
    comparison.unsubscribe(second.id_hash)
    reply = comparison.connection.send(comparison.requests_for(second).attempt(comparison.name, second))
    assert protocol.not_subscribed(reply)


def test_head_whose_reservation_was_withdrawn_is_notified(comparison: ModelComparison) -> None:
    """The end of its reservation is not a time at which it re-checks by itself."""
    comparison.reset()
    tokens: dict[str, int] = {}
    steps = [("attempt", id_hash, True, {"kind": "semaphore", "limit": 2}, 10.0) for id_hash in ID_HASHES[:4]]
    for step in (*steps, ("release", ID_HASHES[0], True, True), ("set_limit", 1)):
        run_both(comparison, step, tokens, "lock", None)


def test_repeated_attempt_of_a_waiter_relies_on_notifications_again(comparison: ModelComparison) -> None:
    """The reply to the first attempt may be lost: then the client does not know that it must re-check."""
    comparison.reset()
    holder, first, second = (claim(id_hash) for id_hash in ID_HASHES[:3])
    for each in (holder, first, second, second):
        comparison.attempt(each)
    comparison.read_notifications()
    comparison.connection.send(comparison.requests_for(holder).release(comparison.name, holder))
    assert [notification.kind for notification in comparison.read_notifications()] == ["reserved", "recheck"]


def test_waiters_that_send_heartbeats_keep_their_positions(comparison: ModelComparison) -> None:
    """Not every heartbeat postpones the expiry of the queue's keys, but enough of them do."""
    comparison.reset()
    tokens: dict[str, int] = {}
    holder, first, second = ID_HASHES[:3]
    for id_hash in (holder, first, second):
        run_both(comparison, ("attempt", id_hash, True, {}, 1000.0), tokens, "lock", None)
    for _ in range(24):
        run_both(comparison, ("pass", 5.0), tokens, "lock", None)
        run_both(
            comparison,
            ("renew", [(holder, True, 1000.0), (first, False, 0.0), (second, False, 0.0)]),
            tokens,
            "lock",
            None,
        )
        comparison.check_inspect()
    run_both(comparison, ("release", holder, True, True), tokens, "lock", None)
    comparison.check_inspect()


@pytest.mark.parametrize("end", ["release", "renew", "break", "attempt"])
def test_call_during_delay_after_expiry_does_not_end_the_delay(end: str, comparison: ModelComparison) -> None:
    """The only holder calls after its ttl but within its delay: the fast paths must check the clock, too."""
    comparison.reset()
    id_hash, tokens = ID_HASHES[0], {}
    ends = {
        "release": ("release", id_hash, True, True),
        "renew": ("renew", [(id_hash, True, 10.0)]),
        "break": ("break", id_hash),
        "attempt": ("attempt", id_hash, False, {"delay": 2.0}, 10.0),
    }
    steps = [("attempt", id_hash, False, {"delay": 2.0}, 1.0), ("pass", 1.5), ends[end]]
    for step in (*steps, ("attempt", ID_HASHES[1], False, {}, 10.0)):
        run_both(comparison, step, tokens, "lock", None)
        comparison.check_inspect()
    assert ID_HASHES[1] not in tokens, "the name is still cooling"


def test_passed_over_waiter_returns_ahead_of_the_head(comparison: ModelComparison) -> None:
    """The returning waiter has the older ticket, also in the call that determines the head of the queue."""
    comparison.reset()
    tokens: dict[str, int] = {}
    holder, first, second = ID_HASHES[:3]
    steps = [
        *[("attempt", id_hash, True, {}, 4.5) for id_hash in (holder, first, second)],
        ("unreachable", first),
        ("renew", [(second, False, 0.0)]),  # the server checks which clients are subscribed
        ("pass", 8.0),
        ("hears", first),
        ("attempt", first, True, {}, 10.0),
    ]
    for step in steps:
        run_both(comparison, step, tokens, "lock", None)
        comparison.check_inspect()
    assert tokens.keys() == {holder, first}


HOLDER, FIRST, SECOND, THIRD, LAST = ID_HASHES
LATE_WAITERS = [  # the server scans the waiters 15 s after FIRST joined: a second before the others' heartbeats end
    *[("attempt", id_hash, True, {}, 17.0) for id_hash in (HOLDER, FIRST)],
    ("pass", 1.0),
    *[("attempt", id_hash, True, {}, 17.0) for id_hash in (SECOND, THIRD)],
]
RELEASE = ("release", HOLDER, True, True)
HEARTBEATS = ("renew", [(FIRST, False, 0.0), (SECOND, False, 0.0), (THIRD, False, 0.0)])
HAND_OFFS = {
    "to an exclusive waiter": [RELEASE, ("attempt", FIRST, True, {}, 10.0)],
    "to the last waiter": [
        *(("release", SECOND, True, True), ("release", THIRD, True, True), RELEASE),
        ("attempt", FIRST, True, {}, 10.0),
    ],
    "to the last waiter, which does not claim": [
        *(("release", SECOND, True, True), ("release", THIRD, True, True), RELEASE, ("pass", 3.0)),
        *(("renew", [(FIRST, False, 0.0)]), ("pass", 1.0)),
    ],
    "ahead of a dead head": [
        *(("pass", 13.0), ("renew", [(FIRST, False, 0.0)]), ("pass", 1.5), ("renew", [(FIRST, False, 0.0)])),
        *(("pass", 1.0), RELEASE),
    ],
    "claimed when its head is dead": [
        *(("pass", 12.0), ("renew", [(FIRST, False, 0.0), (THIRD, False, 0.0)]), ("pass", 1.5), RELEASE, ("pass", 2.0)),
        *(("attempt", FIRST, True, {}, 10.0), ("attempt", THIRD, True, {}, 10.0)),
    ],
    "ahead of an unreachable head": [("unreachable", SECOND), RELEASE],
    "to an unreachable waiter": [("unreachable", FIRST), RELEASE],
    "claimed for less than its head's re-check": [RELEASE, ("attempt", FIRST, True, {}, 0.5)],
    "claimed for a short while by a shared claim": [RELEASE, ("attempt", FIRST, True, {"mode": "shared"}, 10.0)],
    "claimed too late": [RELEASE, ("pass", 3.0), ("attempt", FIRST, True, {}, 10.0)],
    "claimed by another claim": [RELEASE, ("attempt", SECOND, True, {}, 10.0)],
    "after the holder's ttl": [("pass", 13.0), HEARTBEATS, ("pass", 1.5), HEARTBEATS, ("pass", 2.0), RELEASE],
    "after the clock went back": [("pass", -5.0), RELEASE, ("attempt", FIRST, True, {}, 10.0)],
    "with a delay": [RELEASE, ("attempt", FIRST, True, {"delay": 60.0}, 10.0), ("pass", 50.0)],
}


@pytest.mark.parametrize("history", HAND_OFFS)
def test_hand_off_agrees_with_the_model_on_known_histories(history: str, comparison: ModelComparison) -> None:
    comparison.reset()
    for step in [*LATE_WAITERS, *HAND_OFFS[history], RELEASE, ("release", FIRST, True, True)]:
        run_both(comparison, step, {}, "lock", None)
        comparison.check_inspect()


JOIN = ("attempt", LAST, True, {}, 10.0)
CLAIM = ("attempt", FIRST, True, {}, 10.0)
ONLY_FIRST_WAITS = (("release", SECOND, True, True), ("release", THIRD, True, True))
JOINS = {
    "a queue": [JOIN],
    "a queue, twice": [JOIN, JOIN],
    "behind a reservation": [RELEASE, JOIN, CLAIM],
    "behind a reservation whose client is gone": [RELEASE, ("unreachable", FIRST), JOIN],
    "as the head": [*ONLY_FIRST_WAITS, RELEASE, CLAIM, JOIN],
    "as the head behind a reservation": [*ONLY_FIRST_WAITS, RELEASE, ("pass", 0.5), JOIN, CLAIM, ("pass", 40.0)],
    "as the head behind a reservation whose client is gone": [
        *(*ONLY_FIRST_WAITS, RELEASE, ("unreachable", FIRST), JOIN),
    ],
    "behind a head whose client is gone": [("unreachable", FIRST), JOIN],
    "behind a dead head": [
        *(("pass", 5.0), HEARTBEATS, ("attempt", HOLDER, True, {}, 30.0), ("pass", 9.0)),
        *(("renew", [(SECOND, False, 0.0), (THIRD, False, 0.0)]), ("pass", 6.5), JOIN),
    ],
    "ahead of a claim that was passed over": [
        *(*ONLY_FIRST_WAITS, ("unreachable", FIRST), ("attempt", LAST, False, {}, 10.0), JOIN),
        *(("attempt", THIRD, True, {}, 10.0), ("hears", FIRST), CLAIM),
    ],
    "when it is time to scan the waiters": [
        *(("attempt", HOLDER, True, {}, 30.0), ("pass", 5.0), ("renew", [(FIRST, False, 0.0), (THIRD, False, 0.0)])),
        *(("pass", 10.5), JOIN),
    ],
    "when the grant is over": [("pass", 8.0), HEARTBEATS, ("pass", 6.5), HEARTBEATS, ("pass", 2.0), JOIN],
    "after a try": [("attempt", LAST, False, {}, 10.0), JOIN],
    "of a lock where readers share it": [
        *(("release", id_hash, True, True) for id_hash in (FIRST, SECOND, THIRD, HOLDER)),
        *(("attempt", id_hash, True, {"mode": "shared"}, 10.0) for id_hash in (HOLDER, FIRST)),
        *(("attempt", SECOND, True, {}, 10.0), ("release", FIRST, True, True), ("release", SECOND, True, True)),
        *(("attempt", LAST, True, {"mode": "shared"}, 10.0), ("attempt", FIRST, True, {"mode": "shared"}, 10.0)),
        *(("attempt", SECOND, True, {}, 10.0), ("attempt", THIRD, True, {"mode": "shared"}, 10.0)),
    ],
    "of a semaphore": [
        *(("release", id_hash, True, True) for id_hash in (FIRST, SECOND, THIRD, HOLDER)),
        *(("attempt", id_hash, True, {"kind": "semaphore", "limit": 2}, 10.0) for id_hash in (HOLDER, FIRST, SECOND)),
        *(JOIN, ("release", FIRST, True, True), ("release", SECOND, True, True), JOIN),
        ("attempt", LAST, True, {"kind": "semaphore", "limit": 2}, 10.0),
    ],
    "as a semaphore": [("attempt", LAST, True, {"kind": "semaphore", "limit": 2}, 10.0)],
    "to share": [("attempt", LAST, True, {"mode": "shared"}, 10.0)],
    "with a delay": [("attempt", LAST, True, {"delay": 2.0}, 10.0), RELEASE, CLAIM, *ONLY_FIRST_WAITS],
    "with min_hold": [("attempt", LAST, True, {"min_hold": 4.0}, 10.0)],
    "without a subscription": [("unreachable", LAST), JOIN],
}


@pytest.mark.parametrize("history", JOINS)
def test_join_agrees_with_the_model_on_known_histories(history: str, comparison: ModelComparison) -> None:
    comparison.reset()
    ends = [RELEASE, CLAIM, ("release", FIRST, True, True), JOIN, ("release", SECOND, True, True), JOIN]
    for step in [*LATE_WAITERS, *JOINS[history], *ends]:
        run_both(comparison, step, {}, "lock", None)
        comparison.check_inspect()


@pytest.mark.parametrize("shape", [{"mode": "shared"}, {"min_hold": 4.0}])
def test_hand_off_from_and_to_other_shapes_agrees_with_the_model(shape, comparison: ModelComparison) -> None:
    for shapes in (({}, shape), (shape, {}), (shape, shape)):
        comparison.reset()
        held, queued = (("attempt", claim, True, shapes[n], 10.0) for n, claim in enumerate((HOLDER, FIRST)))
        for step in (
            held,
            queued,
            ("attempt", SECOND, True, {}, 10.0),
            RELEASE,
            queued,
            ("release", FIRST, True, True),
        ):
            run_both(comparison, step, {}, "lock", None)
            comparison.check_inspect()
