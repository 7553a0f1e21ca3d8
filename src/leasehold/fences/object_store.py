"""Objects in a store with conditional writes: If-Match with the ETag that was compared, If-None-Match for the first.

Where the ETag is a hash of the content alone (S3 and its kin), a mark kept in the metadata could rise without the ETag
changing, and an older holder's If-Match would still fit. So the mark stands in the object itself, as its first line,
unless you say that every write gives a new ETag (`in_metadata=True`: Azure, or a store behind a proxy of yours).
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Awaitable, Mapping
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote

from leasehold.errors import ConfigError, Unavailable
from leasehold.fences.rules import (
    NO_TOKEN,
    Pass,
    Shown,
    check_resource,
    check_token,
    parse_highest_token,
    to_bytes,
    token_for_read,
    token_for_write,
)
from leasehold.fences.urllib_client import NO_CACHE, check_url, send_request
from leasehold.runtime.base import maybe_await, run_sync

_TRIES: Final = 100  # each failed one means that somebody else got through
_MAGIC: Final = b"leasehold-fence "
_METADATA_KEY: Final = "lease-token"  # of the metadata; a slot's has its number behind it


class Stored(NamedTuple):
    """An object as the store has it."""

    body: bytes
    etag: str
    metadata: Mapping[str, str] = {}


class ObjectStore(Protocol):
    """A store: S3, GCS, Azure, MinIO, through whatever client you use."""

    def get(self, key: str) -> Stored | None:
        """The object; None: there is none."""

    def put(self, key: str, body: bytes, metadata: Mapping[str, str], match: str | None) -> str | None:
        """Write it if its ETag is still `match` (None: if there is none yet). The new ETag; None: it was not."""


class AsyncObjectStore(Protocol):
    """The same, awaited."""

    def get(self, key: str) -> Awaitable[Stored | None]: ...

    def put(self, key: str, body: bytes, metadata: Mapping[str, str], match: str | None) -> Awaitable[str | None]: ...


class _ParsedObject(NamedTuple):
    """An object taken apart."""

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

    async def _claim(self, lease: Shown) -> None:
        await self._compare_and_put(lease, token_for_write(lease), None)

    async def _read(self, lease: Shown) -> bytes:
        body = await self._compare_and_put(lease, token_for_read(lease), None)
        if body is None:
            raise FileNotFoundError(f"there is no object {self.key}")
        return body

    async def _write(self, lease: Shown, data: bytes | str) -> None:
        await self._compare_and_put(lease, token_for_write(lease), to_bytes(data))

    async def _compare_and_put(self, lease: Shown, token_info: Pass, body: bytes | None) -> bytes | None:
        """Compare, and write the object anew where the mark or the content changes. Gives the content."""
        slot = "" if token_info.slot is None else str(token_info.slot)
        for _ in range(_TRIES):
            current = self._parse_object(await maybe_await(self._store.get(self.key)))
            highest_token = current.highest_tokens.get(slot, NO_TOKEN)
            new_highest = check_token(lease, token_info, highest_token, self.resource)
            content = current.body if body is None else body
            if body is None and new_highest == highest_token:
                return content
            etag = await self._store_object(current, {**current.highest_tokens, slot: new_highest}, content)
            if etag is None:
                continue
            if self._in_metadata and new_highest != highest_token and etag == current.etag:
                raise ConfigError(
                    f"the ETag of {self.key} did not change with its metadata: leave out in_metadata=True"
                )
            return content
        raise Unavailable(f"{self.key} changed under each of {_TRIES} tries")

    def _parse_object(self, stored: Stored | None) -> _ParsedObject:
        if stored is None:
            return _ParsedObject(None, {}, {}, None)
        if not stored.etag:
            raise ConfigError(f"the store gave no ETag of {self.key}: without one nothing can be compared")
        if self._in_metadata:
            token_metadata = {name: value for name, value in stored.metadata.items() if name.startswith(_METADATA_KEY)}
            highest_tokens = {
                name.removeprefix(_METADATA_KEY).removeprefix("-"): parse_highest_token(value, self.key)
                for name, value in token_metadata.items()
            }
            other_metadata = {name: value for name, value in stored.metadata.items() if name not in token_metadata}
            # An object claimed before it was written: a store has no metadata without a body.
            absent = not stored.body and other_metadata.get("lease-absent") == "1"
            return _ParsedObject(None if absent else stored.body, highest_tokens, other_metadata, stored.etag)
        if not stored.body.startswith(_MAGIC):  # written before it was fenced
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
            raise ConfigError(f"{self.key} begins like a fenced object, but is no fenced object") from None

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
    """One object of a store. `store`: an `HTTPObjects`, or anything with its two methods, over the client you use."""

    def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do."""
        run_sync(self._claim(lease))

    def read(self, lease: Shown) -> bytes:
        """The content, to decide a write by: older holders write no more. FileNotFoundError: the mark is raised."""
        return run_sync(self._read(lease))

    def write(self, lease: Shown, data: bytes | str) -> None:
        """Write the object. Text is written as UTF-8."""
        run_sync(self._write(lease, data))

    def peek(self) -> bytes | None:
        """The content without a token, for whoever only reads; None: there is none. Decide nothing by it."""
        return self._parse_object(self._store.get(self.key)).body


class AsyncObjectFence(_BaseObjectFence):
    """As `ObjectFence`, for a store whose two methods are awaited."""

    async def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do."""
        await self._claim(lease)

    async def read(self, lease: Shown) -> bytes:
        """The content, to decide a write by: older holders write no more. FileNotFoundError: the mark is raised."""
        return await self._read(lease)

    async def write(self, lease: Shown, data: bytes | str) -> None:
        """Write the object. Text is written as UTF-8."""
        await self._write(lease, data)

    async def peek(self) -> bytes | None:
        """The content without a token, for whoever only reads; None: there is none. Decide nothing by it."""
        return self._parse_object(await self._store.get(self.key)).body


class HTTPObjects:
    """Objects below a URL, by plain HTTP: GET, and PUT with If-Match or If-None-Match."""

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, prefix: str = "x-amz-meta-", timeout: float = 30.0
    ) -> None:
        """`headers`: such as credentials. `prefix`: of headers that carry metadata: `x-amz-meta-`, `x-ms-meta-`."""
        self._url, self._prefix, self._timeout = check_url(url, "objects are").rstrip("/"), prefix.lower(), timeout
        self._headers = {"Content-Type": "application/octet-stream", **(headers or {})}

    def get(self, key: str) -> Stored | None:
        """The object; None: there is none."""
        response = self._request("GET", key, None, NO_CACHE)
        if response is None:
            return None
        body, etag, headers = response
        metadata = {name.removeprefix(self._prefix): value for name, value in headers.items()}
        return Stored(body, etag, metadata)

    def put(self, key: str, body: bytes, metadata: Mapping[str, str], match: str | None) -> str | None:
        """Write it if it is still as it was; gives the new ETag, or None."""
        headers = {f"{self._prefix}{name}": value for name, value in metadata.items()}
        condition = {"If-None-Match": "*"} if match is None else {"If-Match": match}
        response = self._request("PUT", key, body, {**headers, **condition})
        return None if response is None else response[1]

    def _request(
        self, method: str, key: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[bytes, str, dict[str, str]] | None:
        url, request_headers = f"{self._url}/{quote(key)}", {**self._headers, **headers}
        try:
            with send_request(url, method, body, request_headers, timeout=self._timeout) as response:
                response_headers = {name.lower(): value for name, value in response.headers.items()}
                metadata_headers = {
                    name: value for name, value in response_headers.items() if name.startswith(self._prefix)
                }
                return response.read(), response_headers.get("etag", ""), metadata_headers
        except urllib.error.HTTPError as error:
            with error:
                # 409: the store saw another conditional write of the same object under way.
                if error.code == 404 if method == "GET" else error.code in (404, 409, 412):
                    return None
                raise
