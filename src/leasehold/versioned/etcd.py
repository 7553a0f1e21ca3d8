"""The value of an etcd key: the version is its mod revision, compared in the transaction that puts the new value.

Revisions never repeat, so a key that was deleted and created again is never mistaken for the old one. It uses etcd's
JSON gateway: nothing has to be installed.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence

from leasehold.errors import ConfigError, Conflict
from leasehold.fences import etcd_http
from leasehold.fences.etcd_http import Gateway
from leasehold.records.value import BaseValue, Versioned
from leasehold.versioned.base import AsyncValue, Value


class _EtcdBackend:
    def __init__(self, gateway: Gateway, key: str) -> None:
        if not isinstance(key, str) or not key:
            raise ConfigError(f"key must be a non-empty string, not {key!r}")
        self.name, self._gateway = key, gateway

    def read(self) -> Versioned:
        for kv in self._gateway.txn([], [etcd_http.get(self.name)], []).key_values(0):
            return Versioned(kv.value, kv.mod_revision)
        return Versioned(None, 0)

    def write(self, value: bytes, version: int) -> Versioned:
        result = self._gateway.txn(
            [etcd_http.compare_modified(self.name, version)], [etcd_http.put(self.name, value)], []
        )
        if not result.succeeded:
            raise Conflict(self.name)
        return Versioned(value, result.revision)


class _EtcdValue(BaseValue):
    def __init__(
        self,
        endpoints: str | Sequence[str],
        key: str,
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 5.0,
    ) -> None:
        """`endpoints`: URLs of members, tried in order: `"http://127.0.0.1:2379"`. `headers`: such as Authorization.
        `timeout`: seconds for each request."""
        super().__init__(_EtcdBackend(Gateway(endpoints, headers=headers, tls=tls, timeout=timeout), key))


class EtcdKey(_EtcdValue, Value):
    """The value of one etcd key, changed by compare-and-set. Threads may share it."""


class AsyncEtcdKey(_EtcdValue, AsyncValue):
    """The asyncio twin of `EtcdKey`."""
