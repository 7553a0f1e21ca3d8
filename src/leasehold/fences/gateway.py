"""Transactions over etcd's own JSON gateway (`/v3/kv/txn`), for fences and `versioned`: nothing has to be installed."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, Final, NamedTuple, TypeAlias

from leasehold.errors import ConfigError, Unavailable
from leasehold.fences.rules import in_bytes
from leasehold.fences.web import ask, check_url

Operation: TypeAlias = Mapping[str, Mapping[str, str]]  # as the gateway writes it
Compare: TypeAlias = Mapping[str, str]

_NEVER_SENT: Final = (ConnectionRefusedError, socket.gaierror)


class Found(NamedTuple):
    """A key, as it was at the moment of the transaction."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int


class Done(NamedTuple):
    succeeded: bool
    revision: int
    answers: Sequence[Mapping[str, Any]]

    def found(self, place: int) -> list[Found]:
        """What the range at this place found."""
        try:
            kvs = self.answers[place]["response_range"].get("kvs", [])
            return [_found(kv) for kv in kvs]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _malformed() from error


class Gateway:
    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 5.0,
    ) -> None:
        urls = [endpoints] if isinstance(endpoints, str) else endpoints
        self._endpoints = [check_url(one, "members of etcd are").rstrip("/") for one in urls]
        if not self._endpoints:
            raise ConfigError("etcd needs the URL of a member: http://127.0.0.1:2379")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._tls, self._timeout = tls, timeout

    def txn(self, compare: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation]) -> Done:
        """Whether the comparisons held, and the answers to what was done then. Raises `Unavailable`: not known."""
        answer = self._ask({"compare": compare, "success": success, "failure": failure})
        try:
            done = Done(bool(answer.get("succeeded")), int(answer["header"]["revision"]), answer.get("responses", []))
            fits = len(done.answers) == len(success if done.succeeded else failure)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _malformed() from error
        if not fits:
            raise _malformed()
        return done

    def _ask(self, asked: Mapping[str, Any]) -> Any:
        """Of the first member that can be reached. One that was asked and did not answer may still carry it out, later
        than whatever would be asked of the next: then it is for the caller to decide."""
        body, refused = json.dumps(asked).encode(), []
        for endpoint in self._endpoints:
            where = f"{endpoint}/v3/kv/txn"
            try:
                with ask(where, "POST", body, self._headers, timeout=self._timeout, tls=self._tls) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code < 500:
                        raise ConfigError(f"etcd refused the request: {error.read()[:200]!r}") from None
                    raise Unavailable(f"etcd cannot tell whether it was done: {error}", engine="etcd") from error
            except OSError as error:
                if not isinstance(getattr(error, "reason", None), _NEVER_SENT):
                    raise Unavailable(f"etcd did not say whether it was done: {error}", engine="etcd") from error
                refused.append(f"{endpoint}: {error}")
            except (HTTPException, ValueError, RecursionError) as error:
                raise _malformed() from error
        raise Unavailable(f"no member of etcd can be reached: {'; '.join(refused)}", engine="etcd")


def _found(kv: Mapping[str, Any]) -> Found:
    revisions = int(kv["create_revision"]), int(kv["mod_revision"])
    return Found(b64decode(kv["key"]), b64decode(kv.get("value", "")), *revisions)


def put(key: str, value: bytes | str) -> Operation:
    return {"request_put": {"key": packed(key), "value": packed(value)}}


def delete(key: str) -> Operation:
    return {"request_delete_range": {"key": packed(key)}}


def look(key: bytes | str, end: bytes | None = None) -> Operation:
    """Of one key, or of all from there up to `end`."""
    return {"request_range": {"key": packed(key), **({} if end is None else {"range_end": packed(end)})}}


def created(key: bytes | str, revision: int) -> Compare:
    """It is the one that was created then; 0: there is none."""
    return {"key": packed(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def written(key: bytes | str, revision: int) -> Compare:
    """It was last written then; 0: there is none."""
    return {"key": packed(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def below(key: str, value: str) -> Compare:
    return {"key": packed(key), "target": "VALUE", "result": "LESS", "value": packed(value)}


def packed(text: bytes | str) -> str:
    return b64encode(in_bytes(text)).decode()


def _malformed() -> Unavailable:
    return Unavailable("what answered is no etcd, or only half of it: whether it was done is not known", engine="etcd")
