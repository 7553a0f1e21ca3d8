"""What may happen to one name, step by step: an engine with tables must agree with the pure state machine on each.

("attempt", id hash, queue, fields of the claim, ttl)     ("renew", id hash, held)
("release", id hash, keep min_hold, with the claim's id)  ("decline", id hash, id hash of the client's claim)
("unreachable" or "hears", id hash of the client's claim) ("pass", seconds)  ("look",): a sweep
"""

from __future__ import annotations


def attempt_step(id_hash: str, queue: bool = True, ttl: float = 10.0, **shape) -> tuple:
    return ("attempt", id_hash, queue, shape, ttl)


QUEUE_OF_THREE = (attempt_step("a"), attempt_step("b"), attempt_step("c"))
HISTORIES = {
    "a declined reservation goes to the next waiter": (
        *(*QUEUE_OF_THREE, ("release", "a", True, True), ("decline", "b", "c"), ("decline", "b", "b")),
        *(("decline", "b", "b"), attempt_step("b"), attempt_step("c"), ("decline", "c", "c"), attempt_step("b")),
    ),
    "a reservation that is not claimed expires, and its waiter returns": (
        *(
            *QUEUE_OF_THREE,
            ("release", "a", True, True),
            ("pass", 3.0),
            attempt_step("c"),
            attempt_step("b"),
            ("release", "c", True, True),
        ),
        *(attempt_step("b"), ("pass", 5.0), attempt_step("c")),
    ),
    "the head is notified again when its time comes sooner": (
        *(
            attempt_step("a", mode="shared"),
            attempt_step("b", mode="shared", ttl=1.0),
            attempt_step("c"),
            ("renew", "b", True),
        ),
        *(
            ("pass", 0.5),
            attempt_step("d", queue=False, mode="shared"),
            ("release", "a", True, True),
            ("pass", 3.0),
            ("look",),
        ),
    ),
    "the next attempt passes over a waiter that cannot be reached": (
        *(
            *QUEUE_OF_THREE,
            ("release", "a", True, True),
            ("unreachable", "b"),
            ("pass", 0.5),
            attempt_step("c"),
            ("hears", "b"),
            attempt_step("b"),
        ),
    ),
    "a longer hold after a shorter one": (
        *(
            attempt_step("a", ttl=1.0),
            attempt_step("b"),
            attempt_step("a", ttl=10.0),
            ("pass", 0.5),
            attempt_step("c"),
            ("pass", 0.5),
            ("look",),
        ),
    ),
    "a delay, a break, and a break once more": (
        *(
            attempt_step("a", delay=2.0),
            attempt_step("b"),
            ("break", "a"),
            ("pass", 0.5),
            ("break", "a"),
            attempt_step("b"),
            ("pass", 3.0),
        ),
        *(("look",), attempt_step("b")),
    ),
    "a delay after an expiry": (
        *(
            attempt_step("a", ttl=1.0, delay=2.0),
            attempt_step("b"),
            ("pass", 1.5),
            attempt_step("b"),
            attempt_step("c"),
            ("pass", 2.0),
            attempt_step("b"),
        ),
    ),
    "an early release cools": (
        attempt_step("a", min_hold=4.0),
        attempt_step("b"),
        ("release", "a", True, True),
        attempt_step("b"),
        ("pass", 5.0),
        attempt_step("b"),
    ),
    "the release of an unknown claim ends no grant, but a reservation": (
        *(
            *QUEUE_OF_THREE,
            ("release", "a", True, False),
            ("release", "a", True, True),
            ("release", "b", True, False),
            attempt_step("c"),
        ),
    ),
    "waiters not heard of are dropped": (
        *QUEUE_OF_THREE,
        ("pass", 5.0),
        ("renew", "c", False),
        ("pass", 16.0),
        attempt_step("c"),
        attempt_step("b"),
    ),
    "a reservation is claimed ahead of a dead head": (
        *(*QUEUE_OF_THREE, attempt_step("d"), ("renew", "a", True), ("pass", 9.0), ("renew", "a", True)),
        *(("renew", "b", False), ("renew", "d", False), ("pass", 5.0), ("release", "a", True, True), ("pass", 1.5)),
        *(attempt_step("b"), ("release", "b", True, True), attempt_step("d")),
    ),
    "a reservation is claimed for less than the head's re-check": (
        *(*QUEUE_OF_THREE, ("release", "a", True, True), attempt_step("b", ttl=0.5), ("pass", 0.75), ("look",)),
        attempt_step("c"),
    ),
    "a claim joins while a reservation's client is gone": (
        *(*QUEUE_OF_THREE, ("release", "a", True, True), ("unreachable", "b"), attempt_step("d"), attempt_step("c")),
        *(("hears", "b"), attempt_step("b"), ("release", "c", True, True), attempt_step("b")),
    ),
    "a claim joins while the head's client is gone": (
        *(*QUEUE_OF_THREE, ("unreachable", "b"), attempt_step("d"), ("release", "a", True, True), attempt_step("c")),
        attempt_step("d"),
    ),
    "a claim joins behind a dead head": (
        *(*QUEUE_OF_THREE, ("pass", 5.0), ("renew", "a", True), ("pass", 5.0), ("renew", "a", True)),
        *(("renew", "c", False), ("pass", 5.0), attempt_step("d"), ("release", "a", True, True), attempt_step("c")),
    ),
    "a claim joins behind a dead head soon after dead ones were removed": (
        *(*QUEUE_OF_THREE, ("pass", 8.0), ("renew", "a", True), ("renew", "b", False), ("renew", "c", False)),
        *(("pass", 8.0), ("renew", "a", True), ("renew", "c", False), ("pass", 7.0)),
        *(attempt_step("d"), ("release", "a", True, True), attempt_step("c")),
    ),
    "a claim joins behind a dead one that is not the head": (
        *(*QUEUE_OF_THREE, ("pass", 8.0), ("renew", "a", True), ("renew", "b", False), ("pass", 8.0)),
        *(attempt_step("d"), ("release", "a", True, True), attempt_step("b"), attempt_step("d")),
    ),
    "a claim joins when only passed-over ones are queued": (
        *(
            attempt_step("a"),
            attempt_step("b"),
            ("unreachable", "b"),
            attempt_step("c", queue=False),
            attempt_step("d"),
            attempt_step("e"),
        ),
        *(("hears", "b"), attempt_step("b"), ("release", "a", True, True), attempt_step("b"), attempt_step("d")),
    ),
    "a claim becomes the head behind a reservation": (
        *(attempt_step("a"), attempt_step("b"), ("release", "a", True, True), ("pass", 0.5), attempt_step("c")),
        *(attempt_step("b"), attempt_step("d"), ("release", "b", True, True), attempt_step("c"), attempt_step("b")),
    ),
    "the head's re-check comes sooner when another joins": (
        *(attempt_step("a"), attempt_step("b"), attempt_step("c"), ("release", "a", True, True), ("pass", 2.5)),
        *(attempt_step("d"), ("pass", 0.5), attempt_step("e"), attempt_step("c")),
    ),
    "the grant ends before the head's known re-check": (
        *(
            attempt_step("a"),
            attempt_step("b", ttl=1.0),
            attempt_step("c"),
            ("pass", 5.0),
            ("release", "a", True, True),
        ),
        *(attempt_step("b", ttl=0.5), attempt_step("d"), attempt_step("e", ttl=0.5)),
    ),
    "a release finds the first waiter dead": (
        *(*QUEUE_OF_THREE, ("renew", "a", True), ("pass", 5.0), ("renew", "a", True), ("renew", "c", False)),
        *(("pass", 9.0), ("renew", "a", True), ("pass", 1.0), ("release", "a", True, True), attempt_step("c")),
    ),
    "a release finds the first waiter's client gone": (
        *(*QUEUE_OF_THREE, ("unreachable", "b"), ("release", "a", True, True), attempt_step("c"), attempt_step("b")),
    ),
    "a release finds the second waiter dead": (
        *(*QUEUE_OF_THREE, attempt_step("d"), ("pass", 5.0), ("renew", "a", True), ("renew", "b", False)),
        *(("renew", "d", False), ("pass", 9.0), ("renew", "a", True), ("pass", 1.0), ("release", "a", True, True)),
        *(attempt_step("b"), ("release", "b", True, True), attempt_step("d")),
    ),
    "a release finds the second waiter's client gone": (
        *(*QUEUE_OF_THREE, attempt_step("d"), ("unreachable", "c"), ("release", "a", True, True), attempt_step("b")),
        *(("release", "b", True, True), attempt_step("d"), ("hears", "c"), attempt_step("c")),
    ),
    "a release finds one waiter, and another that was passed over": (
        *(*QUEUE_OF_THREE, ("unreachable", "b"), ("look",), ("release", "a", True, True), attempt_step("c")),
        *(("hears", "b"), ("release", "c", True, True), attempt_step("b")),
    ),
    "a held claim attempts again with a queue behind it": (
        *(*QUEUE_OF_THREE, attempt_step("a", ttl=1.0), attempt_step("a"), ("release", "a", True, True)),
        *(attempt_step("b"), attempt_step("b", ttl=1.0), ("release", "b", True, True), attempt_step("c")),
    ),
    "a claim joins while the grant cools": (
        *(attempt_step("a", min_hold=4.0), attempt_step("b"), ("release", "a", True, True), attempt_step("c")),
        *(("pass", 5.0), attempt_step("d"), attempt_step("b")),
    ),
    "a claim joins when the grant is over": (
        attempt_step("a", ttl=1.0),
        attempt_step("b"),
        ("pass", 1.0),
        attempt_step("c"),
    ),
    "a lock is refused where a semaphore is in use": (
        *(attempt_step(id_hash, kind="semaphore", limit=2) for id_hash in "abc"),
        *(attempt_step("d"), ("release", "a", True, True), attempt_step("d")),
    ),
    "the only permit of a semaphore goes to the next waiter": (
        *(attempt_step(id_hash, kind="semaphore", limit=1) for id_hash in "abc"),
        *(("release", "a", True, True), attempt_step("b", kind="semaphore", limit=1), ("release", "b", True, True)),
        attempt_step("c", kind="semaphore", limit=1),
    ),
    "readers go together, a writer alone": (
        *(
            attempt_step("a"),
            attempt_step("b", mode="shared"),
            attempt_step("c", mode="shared"),
            attempt_step("d"),
            attempt_step("e", mode="shared"),
        ),
        *(
            ("release", "a", True, True),
            attempt_step("b", mode="shared"),
            attempt_step("c", mode="shared"),
            attempt_step("e", mode="shared"),
        ),
        *(("release", "b", True, True), ("release", "c", True, True), attempt_step("d")),
    ),
}
