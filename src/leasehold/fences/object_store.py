"""A fence for objects in a store with conditional writes: If-Match with the compared ETag, If-None-Match for the first.

Where the ETag is a hash of the content alone (S3 and similar stores), a highest token in the metadata could rise
without a new ETag, and an older holder's If-Match would still match. So the highest token is kept in the object itself,
as its first line, unless you declare that every write gives a new ETag (`in_metadata=True`: Azure, or a store behind
your own proxy).
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Awaitable, Mapping
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote

from leasehold.config import Duration, check_seconds
from leasehold.errors import ConfigError, Unavailable
from leasehold.fences.rules import (
    NO_TOKEN,
    LeaseLike,
    TokenInfo,
    check_resource,
    check_token,
    parse_highest_token,
    to_bytes,
    token_for_read,
    token_for_write,
)
from leasehold.fences.urllib_client import MIN_RATE, NO_CACHE, check_url, send_request
from leasehold.runtime.base import maybe_await, run_sync

_TRIES: Final = 100  # each failed try means that another client's write succeeded
_MAGIC: Final = b"leasehold-fence "
_METADATA_KEY: Final = "lease-token"  # a slot's key is followed by its number


class StoredObject(NamedTuple):
    """An object as it is in the store."""

    body: bytes
    etag: str
    metadata: Mapping[str, str] = {}


class ObjectStore(Protocol):
    """A store: S3, GCS, Azure, MinIO, through any client library."""

    def get(self, key: str) -> StoredObject | None:
        """The object; None if it does not exist."""

    def put(self, key: str, body: bytes, metadata: Mapping[str, str], match: str | None) -> str | None:
        """Write the object if its ETag is `match` (None: if it does not exist). The new ETag; None if nothing was
        written."""


class AsyncObjectStore(Protocol):
    """Like `ObjectStore`, with methods that are awaited."""

    def get(self, key: str) -> Awaitable[StoredObject | None]: ...

    def put(self, key: str, body: bytes, metadata: Mapping[str, str], match: str | None) -> Awaitable[str | None]: ...


class _ParsedObject(NamedTuple):
    """An object split into its content and its highest tokens."""

    body: bytes | None
    highest_tokens: Mapping[str, int]  # by slot; "" for locks
    metadata: Mapping[str, str]
    etag: str | None


class _BaseObjectFence:
    def __init__(self, store: Any, key: str, *, in_metadata: bool = False) -> None:
        self.key = self.resource = check_resource(key)
        self._store, self._in_metadata = store, in_metadata

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key}>"

    async def _claim(self, lease: LeaseLike) -> None:
        await self._compare_and_put(lease, token_for_write(lease), None)

    async def _read(self, lease: LeaseLike) -> bytes:
        body = await self._compare_and_put(lease, token_for_read(lease), None)
        if body is None:
            raise FileNotFoundError(f"object {self.key} does not exist")
        return body

    async def _write(self, lease: LeaseLike, data: bytes | str) -> None:
        await self._compare_and_put(lease, token_for_write(lease), to_bytes(data))

    async def _compare_and_put(self, lease: LeaseLike, token_info: TokenInfo, body: bytes | None) -> bytes | None:
        """Compare, and write the object if the highest token or the content changes. Returns the content."""
        slot = "" if token_info.slot is None else str(token_info.slot)
        for _ in range(_TRIES):
            current = self._parse_object(await maybe_await(self._store.get(self.key)))
            highest_token = current.highest_tokens.get(slot, NO_TOKEN)
            new_highest = check_token(lease, token_info, highest_token, self.resource, "object")
            content = current.body if body is None else body
            if body is None and new_highest == highest_token:
                return content
            etag = await self._store_object(current, {**current.highest_tokens, slot: new_highest}, content)
            if etag is None:
                continue
            if self._in_metadata and new_highest != highest_token and etag == current.etag:
                raise ConfigError(
                    f"the ETag of {self.key} did not change with its metadata: this store needs in_metadata=False"
                )
            return content
        raise Unavailable(f"{self.key} was changed by other clients during each of {_TRIES} tries; try again")

    def _parse_object(self, stored: StoredObject | None) -> _ParsedObject:
        if stored is None:
            return _ParsedObject(None, {}, {}, None)
        if not stored.etag:
            raise ConfigError(f"the store returned no ETag for {self.key}: a fence needs ETags and conditional writes")
        if self._in_metadata:
            token_metadata = {name: value for name, value in stored.metadata.items() if name.startswith(_METADATA_KEY)}
            highest_tokens = {
                name.removeprefix(_METADATA_KEY).removeprefix("-"): parse_highest_token(value, self.key)
                for name, value in token_metadata.items()
            }
            other_metadata = {name: value for name, value in stored.metadata.items() if name not in token_metadata}
            # Claimed before the first write: a store cannot keep metadata without a body, so the body is empty.
            absent = not stored.body and other_metadata.get("lease-absent") == "1"
            return _ParsedObject(None if absent else stored.body, highest_tokens, other_metadata, stored.etag)
        if not stored.body.startswith(_MAGIC):  # the object was written before it had a fence
            return _ParsedObject(stored.body, {}, stored.metadata, stored.etag)
        first_line, _, body = stored.body.partition(b"\n")
        try:
            header = json.loads(first_line.removeprefix(_MAGIC))
            highest_tokens = {
                str(slot): parse_highest_token(str(highest_token), self.key)
                for slot, highest_token in header["highest_tokens"].items()
            }
            return _ParsedObject(None if header["absent"] else body, highest_tokens, stored.metadata, stored.etag)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ConfigError(f"{self.key} begins like a fenced object, but its first line is not valid") from None

    async def _store_object(
        self, current: _ParsedObject, highest_tokens: Mapping[str, int], content: bytes | None
    ) -> str | None:
        metadata, body = dict(current.metadata), content or b""
        metadata.pop("lease-absent", None)
        if self._in_metadata:
            metadata |= {
                f"{_METADATA_KEY}-{slot}" if slot else _METADATA_KEY: str(highest_token)
                for slot, highest_token in highest_tokens.items()
            }
            if content is None:
                metadata["lease-absent"] = "1"
        else:
            header = json.dumps({"absent": content is None, "highest_tokens": highest_tokens}, sort_keys=True)
            body = _MAGIC + header.encode() + b"\n" + body
        etag: str | None = await maybe_await(self._store.put(self.key, body, metadata, current.etag))
        return etag


class ObjectFence(_BaseObjectFence):
    """Fences one object of a store. `store`: an `HTTPObjects`, or any object with its methods `get` and `put`."""

    def claim(self, lease: LeaseLike) -> None:
        """Only raise the highest token. All methods with a lease raise `StaleToken`."""
        run_sync(self._claim(lease))

    def read(self, lease: LeaseLike) -> bytes:
        """The content, to base a write on. Older holders are refused from now on, even after FileNotFoundError."""
        return run_sync(self._read(lease))

    def write(self, lease: LeaseLike, data: bytes | str) -> None:
        """Write the object. Text is written as UTF-8."""
        run_sync(self._write(lease, data))

    def peek(self) -> bytes | None:
        """The content without a token, for readers that never write; None if the object does not exist."""
        return self._parse_object(self._store.get(self.key)).body


class AsyncObjectFence(_BaseObjectFence):
    """Like `ObjectFence`, for a store whose methods are awaited."""

    async def claim(self, lease: LeaseLike) -> None:
        """Only raise the highest token. All methods with a lease raise `StaleToken`."""
        await self._claim(lease)

    async def read(self, lease: LeaseLike) -> bytes:
        """The content, to base a write on. Older holders are refused from now on, even after FileNotFoundError."""
        return await self._read(lease)

    async def write(self, lease: LeaseLike, data: bytes | str) -> None:
        """Write the object. Text is written as UTF-8."""
        await self._write(lease, data)

    async def peek(self) -> bytes | None:
        """The content without a token, for readers that never write; None if the object does not exist."""
        return self._parse_object(await self._store.get(self.key)).body


class HTTPObjects:
    """Objects below a URL over plain HTTP: GET, and PUT with If-Match or If-None-Match."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        prefix: str = "x-amz-meta-",
        timeout: Duration = 30.0,
    ) -> None:
        """`headers`: sent with each request, such as credentials. `prefix`: of the headers that carry metadata, such as
        `x-amz-meta-` or `x-ms-meta-`."""
        self._url, self._prefix = check_url(url, "an object URL").rstrip("/"), prefix.lower()
        self._timeout = check_seconds("timeout", timeout, allow_zero=False)
        self._headers = {"Content-Type": "application/octet-stream", **(headers or {})}

    def get(self, key: str) -> StoredObject | None:
        """The object; None if it does not exist."""
        response = self._request("GET", key, None, NO_CACHE)
        if response is None:
            return None
        body, etag, headers = response
        metadata = {name.removeprefix(self._prefix): value for name, value in headers.items()}
        return StoredObject(body, etag, metadata)

    def put(self, key: str, body: bytes, metadata: Mapping[str, str], match: str | None) -> str | None:
        """Write the object if its ETag is still `match`. The new ETag; None if nothing was written."""
        headers = {f"{self._prefix}{name}": value for name, value in metadata.items()}
        condition = {"If-None-Match": "*"} if match is None else {"If-Match": match}
        response = self._request("PUT", key, body, {**headers, **condition})
        return None if response is None else response[1]

    def _request(
        self, method: str, key: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[bytes, str, dict[str, str]] | None:
        url, request_headers = f"{self._url}/{quote(key)}", {**self._headers, **headers}
        try:
            with send_request(url, method, body, request_headers, timeout=self._timeout, min_rate=MIN_RATE) as response:
                response_headers = {name.lower(): value for name, value in response.headers.items()}
                metadata_headers = {
                    name: value for name, value in response_headers.items() if name.startswith(self._prefix)
                }
                return response.read(), response_headers.get("etag", ""), metadata_headers
        except urllib.error.HTTPError as error:
            with error:
                # 409: another conditional write of the same object was in progress.
                if error.code == 404 if method == "GET" else error.code in (404, 409, 412):
                    return None
                raise
