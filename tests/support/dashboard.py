"""The dashboard of an application without sockets, and its HTML taken apart."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import UTC, datetime
from functools import wraps
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from leasehold.config import EngineConfig
from leasehold.server import keys
from leasehold.server.app import App, ReadOptions
from leasehold.server.audit import Audit
from leasehold.server.auth import Authenticator
from leasehold.server.limits import Limits
from leasehold.server.messages import EventStream, Request, Response
from leasehold.server.peers import Peer
from leasehold.server.service import Service
from leasehold.server.settings import LimitSettings
from leasehold.telemetry.audit import AuditFile

VOID = frozenset({"br", "input", "link", "meta"})


class Site:
    """One application, and a browser that keeps cookies."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.cookies: dict[str, str] = {}

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Response | EventStream:
        bare, _, query = path.partition("?")
        sent = {"cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items()), **(headers or {})}

        async def read() -> bytes:
            return body

        found = [(name.encode(), value.encode()) for name, value in sent.items() if value]
        answer = await self.app.answer(Request(method, bare, found, query.encode(), read_body=read))
        for name, value in answer.headers:
            if name == b"set-cookie":
                cookie, _, text = value.decode().partition(";")[0].partition("=")
                self.cookies[cookie] = text
        return answer

    async def get(self, path: str, **headers: str) -> Answer:
        return Answer(await self.request("GET", path, headers=headers))

    async def post(self, path: str, fields: dict[str, Any]) -> Answer:
        """A form of the dashboard, with the token of its page."""
        prefix = "__Host-" if self.app.dashboard.secure else ""
        sent = {"form": self.cookies.get(f"{prefix}leasehold_form", ""), **fields}
        return Answer(await self.request("POST", path, urlencode(sent).encode()))

    async def call(self, path: str, **fields: Any) -> dict[str, Any]:
        """A request of the API."""
        answer = await self.request("POST", path, json.dumps(fields).encode())
        assert isinstance(answer, Response)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = json.loads(answer.body)
        return found

    async def acquire(self, name: str, **fields: Any) -> dict[str, Any]:
        return await self.call("/v1/acquire", name=name, **{"ttl": 60, **fields})

    async def waiter(self, name: str, **fields: Any) -> asyncio.Task[dict[str, Any]]:
        """A caller that is in the queue of the name."""
        before = len(await self._queue(name))
        task = asyncio.ensure_future(self.acquire(name, wait=60, **fields))
        async with asyncio.timeout(60):
            while len(await self._queue(name)) <= before:
                await asyncio.sleep(0.01)
        return task

    async def _queue(self, name: str) -> list[Any]:
        deadline = self.app.service.runtime.now() + 60
        found = await self.app.service.inspect("", name, True, deadline)
        return [holding for holding in found if holding.position is not None]


class Answer:
    def __init__(self, answer: Response | EventStream) -> None:
        assert isinstance(answer, Response)
        self.status, self.headers = answer.status, {name.decode(): value.decode() for name, value in answer.headers}
        self.html = answer.body.decode()

    @property
    def page(self) -> Page:
        return Page(self.html)


class Page(HTMLParser):
    """HTML that must be well formed: every element is closed where it should be, and no id is given twice."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.ids: dict[str, str] = {}  # with the text of the element
        self.live: list[str] = []
        self.text = ""
        self._open: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs), f"an attribute is given twice: {tag} {attrs}"
        self.elements.append((tag, found))
        part_id = found.get("id")
        if part_id is not None:
            assert part_id not in self.ids, f"id {part_id} is given twice"
            self.ids[part_id] = ""
            if "data-live" in found:
                self.live.append(part_id)
        if tag not in VOID:
            self._open.append((tag, part_id))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1][0] == tag, f"</{tag}> closes {self._open[-1]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        for _, part_id in self._open:
            if part_id is not None:
                self.ids[part_id] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [found for each, found in self.elements if each == tag]


@contextlib.asynccontextmanager
async def serving(
    url: str = "memory://", key_file: Path | None = None, audit: Path | None = None, peers: Sequence[Peer] = ()
) -> AsyncIterator[Site]:
    service = Service(EngineConfig.parse(url, 60.0))
    with contextlib.ExitStack() as stack:
        log = None if audit is None else Audit(stack.enter_context(AuditFile(audit)), required=False)
        app = App(service, Authenticator(key_file), Limits(LimitSettings()), log, ReadOptions(peers=peers))
        await service.start()
        try:
            yield Site(app)
        finally:
            app.drain()
            await service.stop()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @wraps(test)
    def run(*args: Any, **named: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(120):
                await test(*args, **named)

        asyncio.run(limited())

    return run


def events(data: bytes) -> list[tuple[str, dict[str, Any], str]]:
    """Kind, data and id of server-sent events."""
    found = []
    for event in data.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.split("\n") if ": " in line)
        found.append((fields["event"], json.loads(fields.get("data") or "{}"), fields.get("id", "")))
    return found


def new_key(file: Path, who: str, *rights: str) -> str:
    """An API key with these rights."""
    made = keys.create(file, who, [keys.Right.parse(right) for right in rights], now=datetime.now(UTC))
    assert made is not None
    return made
