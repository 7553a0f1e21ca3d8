"""Which path shows which page, and what every answer to a browser has in common."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from leasehold.core.names import check_name, check_namespace
from leasehold.server.auth import ANYONE, Caller
from leasehold.server.dashboard import actions, records, session, views, words
from leasehold.server.dashboard.engine import Health, engines, name_of
from leasehold.server.dashboard.live import Part, Parts
from leasehold.server.dashboard.overview import overview
from leasehold.server.dashboard.page_data import DAY, NO_PAST, Memory, PageData, latest
from leasehold.server.dashboard.stream import Rendered, Streams
from leasehold.server.keys import ANY_NAMESPACE
from leasehold.server.messages import EventStream, Request, Response, checked, read_query
from leasehold.server.past import Owner
from leasehold.server.picture import Picture, Snapshot
from leasehold.server.problems import Draining, Forbidden, Problem
from leasehold.server.queries import may_see
from leasehold.telemetry.audit.chain import AuditRecord

if TYPE_CHECKING:
    from leasehold.server.app import App

CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # with no-referrer, browsers send forms with the origin null
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_HERE: Final = Path(__file__).parent
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_WRONG_KEY_DELAY: Final = 0.5  # seconds
_MAX_INCIDENTS: Final = 500  # of one page
_RENDER_SECONDS: Final = 30.0  # that a tab waits for its caller's other pages; then it must poll


class Page(NamedTuple):
    key: str
    title: str
    letter: str  # of the keyboard, after `g`


PAGES: Final = {
    "/": Page("overview", "Overview", "o"),
    "/locks": Page("locks", "Locks", "l"),
    "/owners": Page("owners", "Owners", "w"),
    "/incidents": Page("incidents", "Incidents", "i"),
    "/engines": Page("engines", "Engines", "e"),
    "/audit": Page("audit", "Audit", "a"),
}
_LOCK: Final = Page("lock", "Lock", "")
_BY_KEY: Final = {page.key: (path, page) for path, page in {**PAGES, "/lock": _LOCK}.items()}
_ARGUMENTS: Final = ("namespace", "name", "tab", "sort", "filter", "kind", "which")


class NavItem(NamedTuple):
    key: str
    href: str
    label: str
    letter: str
    total: str
    bad: bool


class NamespaceItem(NamedTuple):
    name: str
    href: str


class Dashboard:
    """The pages of one worker."""

    def __init__(self, app: App) -> None:
        self._app, runtime = app, app.service.runtime
        self.admin = False  # whether locks can be broken here
        self.secure = False  # whether browsers reach this server over TLS
        self.demo = False
        self.trace_url: str | None = None  # of a trace, with {trace} for its id
        self.server = os.uname().nodename
        self.health: Callable[[], Health | None] = lambda: None
        self.streams = Streams(runtime.now, runtime.wall, lambda: runtime.random_bytes(8).hex())
        self._memory = Memory()

    async def answer(self, request: Request) -> Response | EventStream | None:
        """The answer to a path of the dashboard; None: this is none."""
        handler = self._handler(request)
        if handler is None:
            return None
        try:
            answer = await handler(request)
        except Exception as error:
            problem = self._app.explain(request, error)
            if problem.status == 401:
                if session.authorization(request, self.secure):  # as in the API: a connection guesses few keys a second
                    await asyncio.sleep(_WRONG_KEY_DELAY)
                answer = self._to_login(request)
            else:
                answer = self._message(
                    problem.status, "That did not work", words.sentence(str(problem)) + ".", back="/", failed=True
                )
        return answer._replace(headers=(*answer.headers, *HEADERS))

    def _handler(self, request: Request) -> Callable[[Request], Awaitable[Response | EventStream]] | None:
        path, is_get = request.path, request.method in ("GET", "HEAD")
        if path.startswith("/ui/static/") and is_get:
            return self._file
        if path in PAGES or path == "/lock":
            return self._page if is_get else None
        found: dict[tuple[str, str], Callable[[Request], Awaitable[Response | EventStream]]] = {
            ("GET", "/ui/stream"): self._stream,
            ("GET", "/login"): self._login_page,
            ("POST", "/login"): self._log_in,
            ("POST", "/logout"): self._log_out,
            ("POST", "/ui/break"): self._break,
        }
        return found.get((request.method, path))

    # --------------------------------------------------------------- static files

    async def _file(self, request: Request) -> Response:
        found = static_files().get(request.path.removeprefix("/ui/static/"))
        if found is None:
            raise Problem("not-found", 404, "there is no such file")
        if request.header(b"if-none-match").strip(b'"') == found.version.encode():
            return Response(304, found.media_type, b"", found.headers)
        return Response(200, found.media_type, found.body, found.headers)

    # ---------------------------------------------------------------------- pages

    async def _page(self, request: Request) -> Response:
        caller, limits = await self._identify(request), self._app.limits
        with limits.call(caller, "read"):
            async with limits.listing(caller, self._app.service.call_timeout):
                return await self._whole_page(request, caller)

    async def _whole_page(self, request: Request, caller: Caller) -> Response:
        arguments = read_query(request.query)
        page = PAGES.get(request.path, _LOCK)
        data, missing = await self._page_data(caller, page, arguments)
        context = await self._context(data, page, missing)
        form_token, cookies = session.form_token(request, self.secure)
        broken = arguments.get("broken", "")
        context |= {"frame": False, "form_token": form_token}
        context["broken"] = int(broken) if broken.isascii() and broken.isdigit() and len(broken) < 20 else None
        parts = Parts()
        context["live"] = parts.live
        self._render("nav.html", context)  # fills two of the parts
        body = self._render(f"{page.key}.html", context)
        html = self._render(
            "layout.html",
            context
            | {
                "nav_html": parts.found["nav"].html,
                "notice_html": parts.found["notice"].html,
                "body": body,
            },
        )
        return Response(200, "text/html; charset=utf-8", html.encode(), cookies)

    async def _page_data(self, caller: Caller, page: Page, arguments: dict[str, str]) -> tuple[PageData, list[str]]:
        """What this caller may see of this page now, and the peers that did not answer."""
        app = self._app
        with checked():
            namespace = check_namespace(arguments.get("namespace", self._default_namespace(caller)))
            name = check_name(arguments.get("name", "")) if page.key == "lock" else ""
        if name:
            if not caller.may("read", namespace, name):
                raise Forbidden(caller.who, "read", namespace, name)
        elif not _may_read_some(caller, namespace):
            raise Forbidden(caller.who, "read", namespace, "", "this namespace")
        picture = await app.pictures.get(namespace)
        if not caller.may_list(namespace, ""):
            picture = _visible(picture, caller)
        found, missing = await app.peers.incidents(namespace)
        now = app.service.runtime.wall()
        data = PageData(
            app=app,
            caller=caller,
            memory=self._memory,
            namespace=namespace,
            arguments=arguments,
            picture=picture,
            now=now,
            may_break=self.admin and bool(name) and caller.may("break", namespace, name),
            incidents=[each for each in found if may_see(caller, each)][:_MAX_INCIDENTS],
            stats=await self._memory.stats(app, namespace, now)
            if page.key == "overview" and caller.may_list(namespace, "")
            else None,
            owners=await self._owners(picture, arguments) if page.key == "owners" else (),
            past=(await app.peers.past(namespace, name)).value if name else NO_PAST,
        )
        return data, list(map(app.peers.names_for(caller), missing))

    async def _owners(self, picture: Picture, arguments: dict[str, str]) -> list[Owner]:
        fits = views.owner_filter(arguments.get("filter", ""))
        return (await self._app.peers.owners(picture, views.MAX_ROWS, fits)).value

    async def _context(self, data: PageData, page: Page, missing: list[str]) -> dict[str, Any]:
        namespace = data.namespace
        context = {
            "page": "locks" if page is _LOCK else page.key,
            "title": page.title,
            "crumb": None,
            "now": data.now,
            "as_of": data.picture.as_of,
            "namespace": namespace,
            "namespaces": [
                NamespaceItem(each, words.link(_BY_KEY[page.key][0] if page is not _LOCK else "/locks", namespace=each))
                for each in self._namespaces(data.caller, namespace)
            ],
            "filter": "",
            "filter_hint": "",
            "kept": {key: value for key, value in data.arguments.items() if key in _ARGUMENTS},
            "is_live": True,
            "links": {key: words.link(path, namespace=namespace) for key, (path, _) in _BY_KEY.items()},
            "home": words.link("/", namespace=namespace),
            "has_peers": len(self._app.peers) > 0,
            "nav": self._nav(data),
            "notices": self._notices(data, missing),
            "foot": self._foot(data.caller),
            "logged_in": data.caller != ANYONE,
        }
        return context | await self._body(data, page, missing)

    async def _body(self, data: PageData, page: Page, missing: list[str]) -> dict[str, Any]:
        match page.key:
            case "overview":
                return overview(data, self.health(), self.server, missing)
            case "locks":
                return views.locks(data)
            case "owners":
                return views.owners(data)
            case "incidents":
                return views.incidents(data)
            case "engines":
                return engines(self._app, self.health())
            case "audit":
                return records.audit(data, await self._audit_records())
        name = data.arguments["name"]
        crumb = NamespaceItem("Locks", words.link("/locks", namespace=data.namespace))
        found = views.lock(data, name)
        url, trace = self.trace_url, found["trace"]
        found["trace_url"] = url.replace("{trace}", quote(trace, safe="")) if url and trace else None
        return found | {"title": words.plain(name), "crumb": {"label": crumb.name, "href": crumb.href}}

    async def _audit_records(self) -> list[AuditRecord] | None:
        if self._app.audit is None:
            return None
        try:
            return await asyncio.to_thread(records.read_tail, self._app.audit.file.path)
        except OSError:
            return []

    def _nav(self, data: PageData) -> list[NavItem]:
        day = len(latest(data.incidents, data.now - DAY))
        counts = {"locks": len(data.locks), "owners": len(data.picture.snapshot.owners), "incidents": day}
        return [
            NavItem(
                page.key,
                words.link(path, namespace=data.namespace),
                page.title,
                page.letter,
                f"{counts[page.key]:,}" if counts.get(page.key) else "",
                page.key == "incidents",
            )
            for path, page in PAGES.items()
        ]

    def _notices(self, data: PageData, missing: list[str]) -> list[tuple[str, str]]:
        notices = []
        if self.demo:
            notices.append(("soft", "This is a demo: the server generates the traffic that you see."))
        if data.picture.stale:
            notices.append(("", "The engine does not answer. You see its last answer."))
        if missing:
            text = f"No answer from {', '.join(missing)}: its part of the history is missing."
            notices.append(("", text))
        return notices

    def _foot(self, caller: Caller) -> list[str]:
        peers = len(self._app.peers)
        lines = [f"{self.server} and {words.counted(peers, 'peer')}" if peers else self.server]
        lines.append(f"over {name_of(self._app)}")
        may_break = self.admin and any("break" in right.verbs for right in caller.rights)
        who = "" if caller == ANYONE else f"{caller.who}, "
        lines.append(who + ("may break locks" if may_break else "read-only"))
        return lines

    def _namespaces(self, caller: Caller, current: str) -> list[str]:
        known = {*self._app.pictures.namespaces(), current}
        known |= {right.namespace for right in caller.rights if right.namespace != ANY_NAMESPACE}
        return sorted(each for each in known if _may_read_some(caller, each))

    def _default_namespace(self, caller: Caller) -> str:
        known = [each for each in self._app.pictures.namespaces() if _may_read_some(caller, each)]
        known += [
            right.namespace for right in caller.rights if right.namespace != ANY_NAMESPACE and "read" in right.verbs
        ]
        return "" if "" in known or not known else known[0]

    def _render(self, template: str, context: dict[str, Any]) -> Markup:
        return Markup(environment().get_template(template).render(context))  # noqa: S704  # escaped by the template

    # ----------------------------------------------------------------------- live

    async def _stream(self, request: Request) -> EventStream:
        if self._app.service.draining:
            raise Draining(done=False)
        caller = await self._identify(request)
        arguments = read_query(request.query)
        _, page = _BY_KEY.get(arguments.get("page", ""), ("", None))
        if page is None or page is _LOCK:
            raise Problem("not-found", 404, "there is no such page")
        last = request.header(b"last-event-id").decode("latin-1") or arguments.get("from", "")
        shown = {key: value for key, value in arguments.items() if key in _ARGUMENTS}
        if "name" in shown:
            page = _LOCK

        limits = self._app.limits

        async def render() -> Rendered:
            data, missing = await self._page_data(caller, page, shown)
            return self._frame(page, await self._context(data, page, missing), data.picture.as_of)

        def turn() -> AbstractAsyncContextManager[None]:
            return limits.listing(caller, _RENDER_SECONDS)

        async with limits.listing(caller, self._app.service.call_timeout):
            await self._page_data(caller, page, shown)  # raises if the caller may not see it
        key = (page.key, tuple(sorted(shown.items())), caller.rights, self.admin)
        return self.streams.open(key, render, turn, last, caller.who, lambda: self._app.authenticator.still(caller))

    def _frame(self, page: Page, context: dict[str, Any], as_of: float) -> Rendered:
        parts = Parts()
        context |= {"frame": True, "form_token": "", "broken": None, "live": parts.live}
        self._render("nav.html", context)
        self._render(f"{page.key}.html", context)
        found: dict[str, Part] = parts.found
        return Rendered(found, as_of, context["say"])

    # -------------------------------------------------------------------- session

    async def _identify(self, request: Request) -> Caller:
        caller = self._app.authenticator.identify(
            session.authorization(request, self.secure), request.certificate_names
        )
        if caller is None:
            raise Problem("unauthorized", 401, "log in")
        await self._app.admit(request, caller)
        return caller

    def _to_login(self, request: Request) -> Response:
        if request.method == "POST":  # a form whose session ended cannot be sent again
            return _redirect("/login")
        there = request.path + (f"?{request.query.decode('latin-1')}" if request.query else "")
        return _redirect(f"/login?next={quote(there, safe='')}")

    async def _login_page(self, request: Request) -> Response:
        token, cookies = session.form_token(request, self.secure)
        there = read_query(request.query).get("next", "/")
        answer = self._message(200, "Log in", "", is_login=True, form_token=token, next=there)
        return answer._replace(headers=cookies)

    async def _log_in(self, request: Request) -> Response:
        request.body = await request.read_body()
        fields = session.read_form(request, self.secure)
        key = fields.get("key", "").strip()
        if self._app.authenticator.identify(b"Bearer " + key.encode(), ()) is None:
            await asyncio.sleep(_WRONG_KEY_DELAY)
            token, cookies = session.form_token(request, self.secure)
            answer = self._message(
                401,
                "Log in",
                "This key is not known here, or it has expired.",
                failed=True,
                is_login=True,
                form_token=token,
                next=fields.get("next", "/"),
            )
            return answer._replace(headers=cookies)
        there = fields.get("next", "/")
        is_ours = there.startswith("/") and not there.startswith(("//", "/\\")) and there.isprintable()
        return _redirect(there if is_ours else "/", self._key_cookie(request, key))

    async def _log_out(self, request: Request) -> Response:
        request.body = await request.read_body()
        session.read_form(request, self.secure)
        return _redirect("/login", self._key_cookie(request, ""))

    def _key_cookie(self, request: Request, key: str) -> tuple[bytes, bytes]:
        return session.key_cookie(key, self.secure or session.over_tls(request))

    # --------------------------------------------------------------------- actions

    async def _break(self, request: Request) -> Response:
        await self._identify(request)
        request.within = self._app.service.call_timeout
        request.body = await request.read_body()
        fields = session.read_form(request, self.secure)
        if not self.admin:
            raise Problem("forbidden", 403, "this server was started without --admin: its dashboard changes nothing")
        broken = await actions.break_(self._app, request, fields)
        there = words.lock_link(broken.namespace, broken.name)
        if broken.token is None:
            text = "The lock has changed since you opened the page: the token that you saw is no longer held."
            return self._message(
                412, "Nothing was broken", text, back=there, back_label="Back to the lock", failed=True
            )
        return _redirect(f"{there}&broken={broken.token}")

    def _message(self, status: int, title: str, text: str, **more: Any) -> Response:
        context = {
            "title": title,
            "text": text,
            "failed": False,
            "is_login": False,
            "back": "",
            "back_label": "",
            "frame": False,
            "now": 0.0,
        } | more
        return Response(status, "text/html; charset=utf-8", self._render("message.html", context).encode())


def _visible(picture: Picture, caller: Caller) -> Picture:
    """The picture without the names that the caller may not read."""
    shown = [each for each in picture.snapshot.holdings if caller.may("read", picture.namespace, each.name)]
    return picture._replace(snapshot=Snapshot(picture.namespace, picture.as_of, shown))


def _may_read_some(caller: Caller, namespace: str) -> bool:
    """Whether there are names in this namespace that the caller may read."""
    return any("read" in right.verbs and right.namespace in (namespace, ANY_NAMESPACE) for right in caller.rights)


def _redirect(there: str, *headers: tuple[bytes, bytes]) -> Response:
    return Response(303, "text/plain; charset=utf-8", b"", ((b"location", there.encode()), *headers))


class _File(NamedTuple):
    media_type: str
    body: bytes
    version: str

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return (b"cache-control", b"max-age=86400"), (b"etag", f'"{self.version}"'.encode())


@cache
def static_files() -> dict[str, _File]:
    """All that a browser loads, by name."""
    found = {}
    for path in (_HERE / "static").iterdir():
        body = path.read_bytes()
        found[path.name] = _File(_TYPES[path.suffix], body, hashlib.sha256(body).hexdigest()[:12])
    return found


@cache
def environment() -> Environment:
    """The templates. Everything that they show is escaped."""
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        auto_reload=False,
    )
    made.globals |= {
        "asset": lambda name: f"/ui/static/{name}?v={static_files()[name].version}",
        "clock": words.clock,
        "duration": words.duration,
        "iso": lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lock_link": words.lock_link,
        "plain": words.plain,
        "rough": words.rough,
        "sentence": words.sentence,
        "short_token": words.token,
    }
    return made
