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
from leasehold.fences.rules import NEVER, Pass, Shown, check_resource, in_bytes, mark_of, raised, to_read, to_write
from leasehold.fences.web import FRESH, ask, check_url
from leasehold.runtime.base import settle, step

_TRIES: Final = 100  # each failed one means that somebody else got through
_MAGIC: Final = b"leasehold-fence "
_HEADER: Final = "lease-token"  # of the metadata; a slot's has its number behind it


class Stored(NamedTuple):
    """An object as the store has it."""

    body: bytes
    etag: str
    metadata: Mapping[str, str] = {}


class Objects(Protocol):
    """A store: S3, GCS, Azure, MinIO, through whatever client you use."""

    def get(self, key: str) -> Stored | None:
        """The object; None: there is none."""

    def put(self, key: str, body: bytes, metadata: Mapping[str, str], match: str | None) -> str | None:
        """Write it if its ETag is still `match` (None: if there is none yet). The new ETag; None: it was not."""


class AsyncObjects(Protocol):
    """The same, awaited."""

    def get(self, key: str) -> Awaitable[Stored | None]: ...

    def put(self, key: str, body: bytes, metadata: Mapping[str, str], match: str | None) -> Awaitable[str | None]: ...


class _Seen(NamedTuple):
    """An object taken apart."""

    body: bytes | None
    marks: Mapping[str, int]  # by slot; "" for locks
    metadata: Mapping[str, str]
    etag: str | None


class _Base:
    def __init__(self, store: Any, key: str, *, in_metadata: bool = False) -> None:
        self.key = self.resource = check_resource(key)
        self._store, self._in_metadata = store, in_metadata

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key}>"

    async def _claim(self, lease: Shown) -> None:
        await self._put(lease, to_write(lease), None)

    async def _read(self, lease: Shown) -> bytes:
        body = await self._put(lease, to_read(lease), None)
        if body is None:
            raise FileNotFoundError(f"there is no object {self.key}")
        return body

    async def _write(self, lease: Shown, data: bytes | str) -> None:
        await self._put(lease, to_write(lease), in_bytes(data))

    async def _put(self, lease: Shown, shown: Pass, body: bytes | None) -> bytes | None:
        """Compare, and write the object anew where the mark or the content changes. Gives the content."""
        slot = "" if shown.slot is None else str(shown.slot)
        for _ in range(_TRIES):
            seen = self._apart(await settle(self._store.get(self.key)))
            mark = seen.marks.get(slot, NEVER)
            after = raised(lease, shown, mark, self.resource)
            content = seen.body if body is None else body
            if body is None and after == mark:
                return content
            etag = await self._together(seen, {**seen.marks, slot: after}, content)
            if etag is None:
                continue
            if self._in_metadata and after != mark and etag == seen.etag:
                raise ConfigError(
                    f"the ETag of {self.key} did not change with its metadata: leave out in_metadata=True"
                )
            return content
        raise Unavailable(f"{self.key} changed under each of {_TRIES} tries")

    def _apart(self, stored: Stored | None) -> _Seen:
        if stored is None:
            return _Seen(None, {}, {}, None)
        if not stored.etag:
            raise ConfigError(f"the store gave no ETag of {self.key}: without one nothing can be compared")
        if self._in_metadata:
            ours = {name: value for name, value in stored.metadata.items() if name.startswith(_HEADER)}
            marks = {
                name.removeprefix(_HEADER).removeprefix("-"): mark_of(value, self.key) for name, value in ours.items()
            }
            rest = {name: value for name, value in stored.metadata.items() if name not in ours}
            # An object claimed before it was written: a store has no metadata without a body.
            absent = not stored.body and rest.get("lease-absent") == "1"
            return _Seen(None if absent else stored.body, marks, rest, stored.etag)
        if not stored.body.startswith(_MAGIC):  # written before it was fenced
            return _Seen(stored.body, {}, stored.metadata, stored.etag)
        line, _, body = stored.body.partition(b"\n")
        try:
            head = json.loads(line.removeprefix(_MAGIC))
            marks = {str(slot): mark_of(str(mark), self.key) for slot, mark in head["marks"].items()}
            return _Seen(None if head["absent"] else body, marks, stored.metadata, stored.etag)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ConfigError(f"{self.key} begins like a fenced object, but is no fenced object") from None

    async def _together(self, seen: _Seen, marks: Mapping[str, int], content: bytes | None) -> str | None:
        metadata, body = dict(seen.metadata), content or b""
        metadata.pop("lease-absent", None)
        if self._in_metadata:
            metadata |= {f"{_HEADER}-{slot}" if slot else _HEADER: str(mark) for slot, mark in marks.items()}
            if content is None:
                metadata["lease-absent"] = "1"
        else:
            head = json.dumps({"absent": content is None, "marks": marks}, sort_keys=True)
            body = _MAGIC + head.encode() + b"\n" + body
        etag: str | None = await settle(self._store.put(self.key, body, metadata, seen.etag))
        return etag


class ObjectFence(_Base):
    """One object of a store. `store`: an `HTTPObjects`, or anything with its two methods, over the client you use."""

    def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do."""
        step(self._claim(lease))

    def read(self, lease: Shown) -> bytes:
        """The content, to decide a write by: older holders write no more. FileNotFoundError: the mark is raised."""
        return step(self._read(lease))

    def write(self, lease: Shown, data: bytes | str) -> None:
        """Write the object. Text is written as UTF-8."""
        step(self._write(lease, data))

    def peek(self) -> bytes | None:
        """The content without a token, for whoever only reads; None: there is none. Decide nothing by it."""
        return self._apart(self._store.get(self.key)).body


class AsyncObjectFence(_Base):
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
        return self._apart(await self._store.get(self.key)).body


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
        answer = self._ask("GET", key, None, FRESH)
        if answer is None:
            return None
        body, etag, found = answer
        metadata = {name.removeprefix(self._prefix): value for name, value in found.items()}
        return Stored(body, etag, metadata)

    def put(self, key: str, body: bytes, metadata: Mapping[str, str], match: str | None) -> str | None:
        """Write it if it is still as it was; gives the new ETag, or None."""
        headers = {f"{self._prefix}{name}": value for name, value in metadata.items()}
        condition = {"If-None-Match": "*"} if match is None else {"If-Match": match}
        answer = self._ask("PUT", key, body, {**headers, **condition})
        return None if answer is None else answer[1]

    def _ask(
        self, method: str, key: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[bytes, str, dict[str, str]] | None:
        where, sent = f"{self._url}/{quote(key)}", {**self._headers, **headers}
        try:
            with ask(where, method, body, sent, timeout=self._timeout) as answer:
                names = {name.lower(): value for name, value in answer.headers.items()}
                ours = {name: value for name, value in names.items() if name.startswith(self._prefix)}
                return answer.read(), names.get("etag", ""), ours
        except urllib.error.HTTPError as error:
            with error:
                # 409: the store saw another conditional write of the same object under way.
                if error.code == 404 if method == "GET" else error.code in (404, 409, 412):
                    return None
                raise
