"""Fences for etcd keys: one transaction checks the token and runs the operations.

`EtcdFence` keeps the highest token in a second key, for leases of any engine. Tokens are written with leading zeros, so
that etcd's comparison of bytes compares numbers, and a write is one round trip: if the highest token is less than
token + 1, raise it and run the operations. `EtcdLockFence` is for leases of the same etcd and stores nothing: its
transactions compare the lock's own key.
"""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from leasehold.config import Duration
from leasehold.core.names import check_name, check_namespace
from leasehold.engines.etcd import queue
from leasehold.engines.etcd.messages import KeyValue, range_end
from leasehold.errors import Unavailable
from leasehold.fences import etcd_http
from leasehold.fences.etcd_http import Gateway, Operation
from leasehold.fences.rules import (
    LeaseLike,
    TokenInfo,
    check_resource,
    check_shared,
    choose_token_key,
    parse_highest_token,
    raise_stale,
    token_for_read,
    token_for_write,
)

_TRIES: Final = 100  # each failed try means that another client's transaction succeeded
_DIGITS: Final = 16  # digits of 2^53


class _BaseEtcdFence(ABC):
    def __init__(self, key: str, gateway: Gateway) -> None:
        self.key = self.resource = check_resource(key)
        self._gateway = gateway

    def claim(self, lease: LeaseLike) -> None:
        """Only raise the highest token. All methods raise `StaleToken`, and `Unavailable` if no member answers."""
        self._commit(lease, token_for_write(lease), [])

    def read(self, lease: LeaseLike) -> bytes | None:
        """The value, or None if the key does not exist, to base a write on. Older holders are refused from now on."""
        result, offset = self._commit(lease, token_for_read(lease), [etcd_http.get(self.key)])
        kvs = result.key_values(offset)
        return kvs[0].value if kvs else None

    def write(self, lease: LeaseLike, value: bytes | str) -> None:
        """Put the value. Text is written as UTF-8."""
        self._commit(lease, token_for_write(lease), [etcd_http.put(self.key, value)])

    def txn(self, lease: LeaseLike, *operations: Operation) -> list[Any]:
        """Run operations in one transaction and return their responses. Make them with `put` and `delete`, or as JSON
        for etcd's gateway."""
        result, offset = self._commit(lease, token_for_write(lease), operations)
        return list(result.responses[offset:])

    @staticmethod
    def put(key: str, value: bytes | str) -> Operation:
        """An operation for `txn`: put a key."""
        return etcd_http.put(key, value)

    @staticmethod
    def delete(key: str) -> Operation:
        """An operation for `txn`: delete a key."""
        return etcd_http.delete(key)

    @abstractmethod
    def _commit(
        self, lease: LeaseLike, token_info: TokenInfo, operations: Sequence[Operation]
    ) -> tuple[etcd_http.TxnResult, int]:
        """Check the token and run `operations` in one transaction. Also returns where their responses begin."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key}>"


class EtcdFence(_BaseEtcdFence):
    """Fences the value of one key or, with `txn`, any keys. The highest token is kept in the key `KEY.fence` (for a
    semaphore, `KEY.fence.SLOT`).

    There is no asyncio twin: use `await asyncio.to_thread(fence.write, lease, value)`.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        key: str,
        *,
        token_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: Duration = 5.0,
    ) -> None:
        """`endpoints`: URLs of members, tried in turn, such as `"http://127.0.0.1:2379"`. `token_key`: the key where
        the highest token is kept. `headers`: sent with each request, such as Authorization."""
        super().__init__(key, Gateway(endpoints, headers=headers, tls=tls, timeout=timeout))
        self._token_key = choose_token_key("token_key", token_key, f"{key}.fence", key)

    def _commit(
        self, lease: LeaseLike, token_info: TokenInfo, operations: Sequence[Operation]
    ) -> tuple[etcd_http.TxnResult, int]:
        token_key = self._token_key if token_info.slot is None else f"{self._token_key}.{token_info.slot}"
        raise_operations = [] if token_info.shared else [etcd_http.put(token_key, _digits(token_info.token))]
        # A missing key compares as neither less nor greater, so the first use needs its own comparison. The lower bound
        # excludes foreign values that sort before any token: parse_highest_token() then refuses them.
        comparisons = (
            [
                etcd_http.compare_less(token_key, _digits(token_info.token + 1)),
                {**etcd_http.compare_less(token_key, _digits(0)), "result": "GREATER"},
            ],
            [etcd_http.compare_created(token_key, 0)],
        )
        for attempt in range(_TRIES):
            result = self._gateway.txn(
                comparisons[attempt % 2], [*raise_operations, *operations], [etcd_http.get(token_key)]
            )
            if result.succeeded:
                return result, len(raise_operations)
            for kv in result.key_values(0):
                if (highest_token := parse_highest_token(kv.value, token_key)) > token_info.token:
                    raise_stale(lease, token_info, highest_token, self.resource, "etcd")
        raise Unavailable(f"{self.resource} was changed by other clients during each of {_TRIES} tries; try again")


class _LockKey(NamedTuple):
    """The key of a granted lock."""

    token: int
    key: bytes
    create_revision: int
    shared: bool


class EtcdLockFence(_BaseEtcdFence):
    """Fences the value of one key or, with `txn`, any keys, by checking that the lock's key exists in the same etcd.

    Nothing is stored. A lease is refused from the moment its lock is free, even if no other client has acquired it yet.
    Permits of a semaphore need no slots.
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
        timeout: Duration = 5.0,
    ) -> None:
        """`lock`: the name of the lock, in `namespace`, of clients with the URL `etcd://.../prefix`. `endpoints`: URLs
        of members of the same etcd, tried in turn."""
        super().__init__(key, Gateway(endpoints, headers=headers, tls=tls, timeout=timeout))
        self._root = queue.key_root(prefix.strip("/"))
        self._queue_prefix = queue.names_prefix(self._root, check_namespace(namespace), check_name(lock), exact=True)
        self._last_lock_key: _LockKey | None = None  # replaced as a whole: threads may share a fence

    def _commit(
        self, lease: LeaseLike, token_info: TokenInfo, operations: Sequence[Operation]
    ) -> tuple[etcd_http.TxnResult, int]:
        reads = [
            etcd_http.get(self._queue_prefix, range_end(self._queue_prefix)),
            etcd_http.get(queue.token_base_key(self._root)),
        ]
        lock_key = self._last_lock_key
        if lock_key is None or lock_key.token != token_info.token:
            lock_key = self._find_lock_key(lease, token_info, self._gateway.txn([], reads, []))
        for _ in range(2):  # the remembered key may date from before a restore of etcd's data
            check_shared(token_info, lock_key.shared)
            # Compare the creation revision too: another claim may have created the same key since.
            result = self._gateway.txn(
                [etcd_http.compare_created(lock_key.key, lock_key.create_revision)], operations, reads
            )
            if result.succeeded:
                self._last_lock_key = lock_key
                return result, 0
            lock_key = self._find_lock_key(lease, token_info, result)
        raise Unavailable(f"the lock of {self.resource} changed during each try; try again")

    def _find_lock_key(self, lease: LeaseLike, token_info: TokenInfo, read_result: etcd_http.TxnResult) -> _LockKey:
        """The lock's key with this token. The writing transaction compares again that it exists."""
        kvs = [
            KeyValue(key=kv.key, value=kv.value, create_revision=kv.create_revision) for kv in read_result.key_values(0)
        ]
        entries = [entry for kv in kvs if (entry := queue.parse_entry(self._root, kv)) is not None]
        own_entry = next((entry for entry in entries if entry.token == token_info.token), None)
        if own_entry is None:
            # If there is no newer holder, the error names the revision at which the lock was found free.
            base = [parse_highest_token(kv.value, "the token base key") for kv in read_result.key_values(1)]
            newer = [entry.token for entry in entries if entry.token > token_info.token]
            seen = max(newer, default=sum(base) + read_result.revision)
            raise_stale(lease, token_info, seen, self.resource, "etcd")
        return _LockKey(token_info.token, own_entry.key, own_entry.create_revision, own_entry.mode == "shared")


def _digits(number: int) -> str:
    return str(number).zfill(_DIGITS)
