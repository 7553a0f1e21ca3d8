"""etcd keys: mark and operations are one transaction.

`EtcdFence` keeps a mark beside the key, for leases of any engine. Marks are written with leading zeros, so that etcd's
comparison of bytes is one of numbers, and a write is one trip: if the mark is below the next token, then raise it and
do the rest. `EtcdLockFence` is for leases of the same etcd, and keeps nothing: the lock's own key is compared.
"""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from leasehold.core.names import check_name, check_namespace
from leasehold.engines.etcd import line
from leasehold.engines.etcd.wire import KeyValue
from leasehold.errors import Unavailable
from leasehold.fences import gateway
from leasehold.fences.gateway import Gateway, Operation
from leasehold.fences.rules import (
    Pass,
    Shown,
    check_resource,
    check_shared,
    mark_of,
    place_of,
    refuse,
    to_read,
    to_write,
)

_TRIES: Final = 100  # each failed one means that somebody else got through
_DIGITS: Final = 16  # of 2^53


class _Etcd(ABC):
    def __init__(self, key: str, gateway: Gateway) -> None:
        self.key = self.resource = check_resource(key)
        self._gateway = gateway

    def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do; `Unavailable`: nobody answered."""
        self._commit(lease, to_write(lease), [])

    def read(self, lease: Shown) -> bytes | None:
        """The value, to decide a write by: older holders write no more. None: there is none; the mark is raised."""
        done, at = self._commit(lease, to_read(lease), [gateway.look(self.key)])
        found = done.found(at)
        return found[0].value if found else None

    def write(self, lease: Shown, value: bytes | str) -> None:
        """Put the value. Text is written as UTF-8."""
        self._commit(lease, to_write(lease), [gateway.put(self.key, value)])

    def txn(self, lease: Shown, *operations: Operation) -> list[Any]:
        """Any operations, made by `put` and `delete` or as the gateway writes them, in one step; gives its answers."""
        done, at = self._commit(lease, to_write(lease), operations)
        return list(done.answers[at:])

    @staticmethod
    def put(key: str, value: bytes | str) -> Operation:
        """An operation for `txn`."""
        return gateway.put(key, value)

    @staticmethod
    def delete(key: str) -> Operation:
        """An operation for `txn`."""
        return gateway.delete(key)

    @abstractmethod
    def _commit(self, lease: Shown, shown: Pass, operations: Sequence[Operation]) -> tuple[gateway.Done, int]:
        """Compare and do, in one transaction. Where the answers to `operations` begin."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key}>"


class EtcdFence(_Etcd):
    """The value of one key; with `txn`, any keys. The mark is in the key `KEY.fence` (and `.fence.SLOT`).

    No asyncio side: there, use `await asyncio.to_thread(fence.write, lease, value)`.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        key: str,
        *,
        mark: str | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 5.0,
    ) -> None:
        """`endpoints`: URLs of members, tried in turn: `"http://127.0.0.1:2379"`. `headers`: such as Authorization."""
        super().__init__(key, Gateway(endpoints, headers=headers, tls=tls, timeout=timeout))
        self._mark = place_of(mark, f"{key}.fence", key)

    def _commit(self, lease: Shown, shown: Pass, operations: Sequence[Operation]) -> tuple[gateway.Done, int]:
        mark = self._mark if shown.slot is None else f"{self._mark}.{shown.slot}"
        raising = [] if shown.shared else [gateway.put(mark, _digits(shown.token))]
        # A key that is not there is below nothing, so the first use is a question of its own. The least mark there is
        # keeps out what is none: whatever else somebody put there is looked at.
        questions = (
            [gateway.below(mark, _digits(shown.token + 1)), {**gateway.below(mark, _digits(0)), "result": "GREATER"}],
            [gateway.created(mark, 0)],
        )
        for turn in range(_TRIES):
            done = self._gateway.txn(questions[turn % 2], [*raising, *operations], [gateway.look(mark)])
            if done.succeeded:
                return done, len(raising)
            for found in done.found(0):
                if (seen := mark_of(found.value, mark)) > shown.token:
                    refuse(lease, shown, seen, self.resource)
        raise Unavailable(f"{self.resource} changed under each of {_TRIES} tries")


class EtcdLockFence(_Etcd):
    """The value of one key; with `txn`, any keys: while the key of the lock itself stands, in the same etcd.

    Nothing is stored. A lease is refused from the moment its lock is free for others, also if nobody has come yet, and
    permits of a semaphore need no slots.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        key: str,
        *,
        lock: str,
        namespace: str = "",
        prefix: str = "",
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 5.0,
    ) -> None:
        """`lock`: the name that is locked, in `namespace`, by a client of `etcd://.../prefix`. `endpoints`: URLs of
        members of that very etcd, tried in turn."""
        super().__init__(key, Gateway(endpoints, headers=headers, tls=tls, timeout=timeout))
        self._root = line.root(prefix.strip("/"))
        self._line = line.names(self._root, check_namespace(namespace), check_name(lock), exact=True)
        self._own: dict[int, tuple[bytes, int]] = {}  # of the token last shown: the lock's key, and when it was created

    def _commit(self, lease: Shown, shown: Pass, operations: Sequence[Operation]) -> tuple[gateway.Done, int]:
        looks = [gateway.look(self._line, line.after(self._line)), gateway.look(line.base_key(self._root))]
        for _ in range(2):  # what is known of a token may be known from before a restore of etcd's data
            key, created = self._own.get(shown.token) or self._find(lease, shown, self._gateway.txn([], looks, []))
            # It names the creation it means: the same key may serve another claim by now.
            done = self._gateway.txn([gateway.created(key, created)], operations, looks)
            if done.succeeded:
                return done, 0
            self._own.clear()
            self._find(lease, shown, done)
        raise Unavailable(f"the lock of {self.resource} changed under each try")

    def _find(self, lease: Shown, shown: Pass, looked: gateway.Done) -> tuple[bytes, int]:
        """The key of the lock that has this token. That it stands is compared again, in the step that writes."""
        kvs = [KeyValue(key=kv.key, value=kv.value, create_revision=kv.create_revision) for kv in looked.found(0)]
        claims = [seen for kv in kvs if (seen := line.seen(self._root, kv)) is not None]
        own = next((seen for seen in claims if seen.token == shown.token), None)
        if own is None:
            # Nobody need have come since: then it is told at which revision the lock was found to be over.
            base = [mark_of(kv.value, "the base of all tokens") for kv in looked.found(1)]
            newer = [seen.token for seen in claims if seen.token > shown.token]
            refuse(lease, shown, max(newer, default=sum(base) + looked.revision), self.resource)
        check_shared(shown, own.mode == "shared")
        self._own = {shown.token: (own.key, own.created)}
        return self._own[shown.token]


def _digits(number: int) -> str:
    return str(number).zfill(_DIGITS)
