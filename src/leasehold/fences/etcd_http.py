"""Transactions over etcd's own JSON gateway (`/v3/kv/txn`), for fences: needs no extra package."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, Final, NamedTuple, TypeAlias

from leasehold.config import Duration, check_seconds
from leasehold.errors import ConfigError, Unavailable
from leasehold.fences.rules import to_bytes
from leasehold.fences.urllib_client import check_url, send_request

Operation: TypeAlias = Mapping[str, Mapping[str, str]]  # as JSON for the gateway
Compare: TypeAlias = Mapping[str, str]

_MAX_BODY: Final = 8 << 20  # bytes: of ten thousand waiters
_MAX_CONTAINERS: Final = 100_000  # lists and objects of an answer: three bytes of text can take eighty of memory
_MAX_VALUES: Final = 500_000
_NEVER_SENT: Final = (ConnectionRefusedError, socket.gaierror)


class EtcdKeyValue(NamedTuple):
    """A key as it was at the moment of the transaction."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int


class TxnResult(NamedTuple):
    succeeded: bool
    revision: int
    responses: Sequence[Mapping[str, Any]]

    def key_values(self, index: int) -> list[EtcdKeyValue]:
        """What the range request at `index` found."""
        try:
            kvs = self.responses[index]["response_range"].get("kvs", [])
            return [_parse_key_value(kv) for kv in kvs]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _malformed_response() from error


class Gateway:
    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: Duration = 5.0,
    ) -> None:
        urls = [endpoints] if isinstance(endpoints, str) else endpoints
        self._endpoints = [check_url(url, "an etcd endpoint").rstrip("/") for url in urls]
        if not self._endpoints:
            raise ConfigError("no etcd endpoint: pass the URL of at least one member, such as http://127.0.0.1:2379")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._tls, self._timeout = tls, check_seconds("timeout", timeout, allow_zero=False)

    def txn(self, compare: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation]) -> TxnResult:
        """Whether the comparisons held, and the responses. Raises `Unavailable` if that is not known."""
        response = self._post({"compare": compare, "success": success, "failure": failure})
        try:
            result = TxnResult(
                bool(response.get("succeeded")), int(response["header"]["revision"]), response.get("responses", [])
            )
            fits = len(result.responses) == len(success if result.succeeded else failure)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _malformed_response() from error
        if not fits:
            raise _malformed_response()
        return result

    def _post(self, request: Mapping[str, Any]) -> Any:
        """The response of the first member that can be reached. A member that got the request and did not answer may
        still apply it, even after a retry on another member. So there is no retry, and the caller must decide."""
        body, failures = json.dumps(request).encode(), []
        for endpoint in self._endpoints:
            url = f"{endpoint}/v3/kv/txn"
            try:
                with send_request(url, "POST", body, self._headers, timeout=self._timeout, tls=self._tls) as response:
                    return _decode(response.read(_MAX_BODY + 1))
            except urllib.error.HTTPError as error:
                with error:
                    if error.code < 500:
                        raise ConfigError(f"etcd refused the request: {error.read(200)!r}") from None
                    raise Unavailable(
                        f"etcd failed; the transaction may or may not have been applied: {error}", engine="etcd"
                    ) from error
            except OSError as error:
                if not isinstance(getattr(error, "reason", None), _NEVER_SENT):
                    raise Unavailable(
                        f"etcd did not answer; the transaction may or may not have been applied: {error}", engine="etcd"
                    ) from error
                failures.append(f"{endpoint}: {error}")
            except (HTTPException, ValueError, RecursionError) as error:
                raise _malformed_response() from error
        raise Unavailable(f"cannot connect to any etcd member: {'; '.join(failures)}", engine="etcd")


def _decode(body: bytes) -> Any:
    containers = body.count(b"[") + body.count(b"{")
    if len(body) > _MAX_BODY or containers > _MAX_CONTAINERS or body.count(b",") > _MAX_VALUES:
        raise ValueError("the answer is too long")
    return json.loads(body)


def _parse_key_value(kv: Mapping[str, Any]) -> EtcdKeyValue:
    revisions = int(kv["create_revision"]), int(kv["mod_revision"])
    return EtcdKeyValue(b64decode(kv["key"]), b64decode(kv.get("value", "")), *revisions)


def put(key: str, value: bytes | str) -> Operation:
    return {"request_put": {"key": to_base64(key), "value": to_base64(value)}}


def delete(key: str) -> Operation:
    return {"request_delete_range": {"key": to_base64(key)}}


def get(key: bytes | str, end: bytes | None = None) -> Operation:
    """Read one key, or all keys from `key` up to but without `end`."""
    return {"request_range": {"key": to_base64(key), **({} if end is None else {"range_end": to_base64(end)})}}


def compare_created(key: bytes | str, revision: int) -> Compare:
    """The key was created at this revision; 0: it does not exist."""
    return {"key": to_base64(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def compare_less(key: str, value: str) -> Compare:
    return {"key": to_base64(key), "target": "VALUE", "result": "LESS", "value": to_base64(value)}


def to_base64(text: bytes | str) -> str:
    return b64encode(to_bytes(text)).decode()


def _malformed_response() -> Unavailable:
    return Unavailable("unexpected response from etcd; the transaction may or may not have been applied", engine="etcd")
