"""etcd keys: mark and operations are one transaction, over etcd's own JSON gateway: nothing has to be installed.

Marks are written with leading zeros, so that etcd's comparison of bytes is one of numbers, and a write is one trip: if
the mark is below the next token, then raise it and do the rest.
"""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from leasehold.errors import ConfigError, Unavailable
from leasehold.fences.rules import Pass, Shown, check_resource, refuse, to_read, to_write

Operation: TypeAlias = Mapping[str, Mapping[str, str]]  # as the gateway writes it

_TRIES: Final = 100  # each failed one means that somebody else got through
_DIGITS: Final = 16  # of 2^53
_NEVER_SENT: Final = (ConnectionRefusedError, socket.gaierror)


class EtcdFence:
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
        self._endpoints = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        if not self._endpoints or not all(one.startswith(("http://", "https://")) for one in self._endpoints):
            raise ConfigError("etcd is reached by http:// or https:// URLs of its members")
        self.key = self.resource = check_resource(key)
        self._mark = f"{key}.fence" if mark is None else mark
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._tls, self._timeout = tls, timeout

    def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do; `Unavailable`: nobody answered."""
        self._commit(lease, to_write(lease), [])

    def read(self, lease: Shown) -> bytes | None:
        """The value, to decide a write by: older holders write no more. None: there is none; the mark is raised."""
        (answer,) = self._commit(lease, to_read(lease), [{"request_range": {"key": _packed(self.key)}}])
        found = answer["response_range"].get("kvs")
        return b64decode(found[0].get("value", "")) if found else None

    def write(self, lease: Shown, value: bytes | str) -> None:
        """Put the value. Text is written as UTF-8."""
        self._commit(lease, to_write(lease), [self.put(self.key, value)])

    def txn(self, lease: Shown, *operations: Operation) -> list[Any]:
        """Any operations, made by `put` and `delete` or as the gateway writes them, in one step; gives its answers."""
        return self._commit(lease, to_write(lease), operations)

    @staticmethod
    def put(key: str, value: bytes | str) -> Operation:
        """An operation for `txn`."""
        return {"request_put": {"key": _packed(key), "value": _packed(value)}}

    @staticmethod
    def delete(key: str) -> Operation:
        """An operation for `txn`."""
        return {"request_delete_range": {"key": _packed(key)}}

    def _commit(self, lease: Shown, shown: Pass, operations: Sequence[Operation]) -> list[Any]:
        mark = self._mark if shown.slot is None else f"{self._mark}.{shown.slot}"
        raising = [] if shown.shared else [self.put(mark, _digits(shown.token))]
        below = {"key": _packed(mark), "target": "VALUE", "result": "LESS", "value": _packed(_digits(shown.token + 1))}
        absent = {"key": _packed(mark), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        look = {"request_range": {"key": _packed(mark)}}
        for turn in range(_TRIES):
            # A key that is not there is below nothing: the first use is a question of its own.
            asked = {"compare": [absent if turn % 2 else below], "success": [*raising, *operations], "failure": [look]}
            answer = self._ask(asked)
            answers = answer.get("responses", [])
            if answer.get("succeeded"):
                return list(answers[len(raising) :])
            found = answers[0]["response_range"].get("kvs")
            if found and (seen := int(b64decode(found[0]["value"]))) > shown.token:
                refuse(lease, shown, seen, self.resource)
        raise Unavailable(f"{self.resource} changed under each of {_TRIES} tries")

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Of the first member that can be reached. One that was asked and did not answer may still carry it out, later
        than whatever would be asked of the next: then it is for the caller to decide."""
        body, refused = json.dumps(asked).encode(), []
        for endpoint in self._endpoints:
            request = urllib.request.Request(f"{endpoint}/v3/kv/txn", body, self._headers)  # noqa: S310  # checked
            try:
                with urllib.request.urlopen(request, timeout=self._timeout, context=self._tls) as answer:  # noqa: S310
                    return json.load(answer)  # type: ignore[no-any-return]
            except urllib.error.HTTPError as error:
                with error:
                    if error.code < 500:
                        raise ConfigError(f"etcd refused the request: {error.read()[:200]!r}") from None
                    raise Unavailable(f"etcd cannot tell whether it was done: {error}", engine="etcd") from error
            except OSError as error:
                if not isinstance(getattr(error, "reason", None), _NEVER_SENT):
                    raise Unavailable(f"etcd did not say whether it was done: {error}", engine="etcd") from error
                refused.append(f"{endpoint}: {error}")
        raise Unavailable(f"no member of etcd can be reached: {'; '.join(refused)}", engine="etcd")

    def __repr__(self) -> str:
        return f"<EtcdFence {self.key}>"


def _digits(number: int) -> str:
    return str(number).zfill(_DIGITS)


def _packed(text: bytes | str) -> str:
    return b64encode(text.encode() if isinstance(text, str) else text).decode()
