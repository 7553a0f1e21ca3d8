"""Runs the application on uvicorn: sockets, signals, drain, and files that are read again when they change.

SIGTERM and SIGINT drain: streams and long-polls end at once, so that their clients continue at another server, requests
under way are answered, and then the process ends with exit status 0. SIGHUP reads the key file and the certificates
again, and never ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, Final

import uvicorn
import uvloop

from leasehold import files
from leasehold.config import EngineConfig
from leasehold.errors import ConfigError
from leasehold.server import spans
from leasehold.server.app import App, ReadOptions
from leasehold.server.audit import Audit
from leasehold.server.auth import Authenticator
from leasehold.server.demo import ExampleTraffic
from leasehold.server.limits import Limits
from leasehold.server.listener import MAX_HANDSHAKES, Listener
from leasehold.server.peers import Peer
from leasehold.server.protocol import Rules, protocol_for
from leasehold.server.service import Service
from leasehold.server.settings import Settings, split_address
from leasehold.server.tls import Certificates
from leasehold.server.workers import Worker, WorkerRelay, Workers
from leasehold.telemetry import EngineHealth
from leasehold.telemetry.audit import AuditFile
from leasehold.telemetry.logs import JSONFormatter

_log = logging.getLogger("leasehold.server")

_BACKLOG: Final = 2048
_SEND_BUFFER: Final = 64 * 1024  # bytes of one connection in the kernel: else megabytes that the caller does not read
_KEEP_ALIVE: Final = 75  # seconds that an idle connection stays open: longer than common proxies keep theirs
_DRAIN_SECONDS: Final = 10.0
_REFRESH_INTERVAL: Final = 0.5  # seconds between two checks of the key file and the certificates; two must agree
# Open files besides those of admitted connections: of the engine, logs and libraries; of up to a hundred callers who
# are told that they are refused; and of connections that were accepted and are not refused yet.
_OTHER_FILES: Final = 256


class Server(uvicorn.Server):
    """uvicorn's server, with the drain before its shutdown: that waits for open streams, so they must end first. It
    would also raise the signal again at the end, and then the exit status would be that of a killed process."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: App,
        certificates: Certificates | None,
        on_started: Callable[[], None],
        on_hangup: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._app, self._certificates = app, certificates
        self._on_started, self._on_hangup = on_started, on_hangup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own would accept one connection in each turn of the event loop, and wait a minute for half a TLS
        handshake."""

        def connect() -> asyncio.Protocol:
            protocol_class: Any = self.config.http_protocol_class
            made: asyncio.Protocol = protocol_class(config=self.config, server_state=self.server_state, app_state={})
            return made

        certificates = self._certificates
        context = None if certificates is None else lambda: certificates.context
        self.servers = [Listener(sock, connect, context) for sock in sockets or ()]  # type: ignore[misc]
        self.started = True
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        yield  # the handlers stay: a second signal must not interrupt what follows

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.drain()  # first: closing connections must not look like callers that hang up
        self.should_exit = True


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it. `say` gets the line for each address, once it is served. Raises ConfigError."""
    _prepare_logs(settings)
    connections = _allow_open_files(settings.limits.connections, MAX_HANDSHAKES if settings.tls else 0)
    settings = replace(settings, limits=replace(settings.limits, connections=connections))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until its handler is set
    check(settings)
    with contextlib.ExitStack() as stack:
        mode = 0o660 if settings.authenticates else 0o600
        sockets = [stack.enter_context(listen(address, mode)) for address in settings.listen]

        def on_started() -> None:
            for address, sock in zip(settings.listen, sockets, strict=True):
                say(f"listening on {shown_address(address, sock, settings.tls is not None)}")

        instance = secrets.token_hex(8)  # the same for all workers

        def run(worker: Worker | None = None) -> None:
            started = on_started if worker is None else worker.on_started
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(settings, sockets, started, worker, instance))

        if settings.workers == 1:
            run()
        else:
            Workers(settings.workers, run).run(on_started)


def _allow_open_files(connections: int, handshakes: int) -> int:
    """A shell often allows 1,024 open files, fewer than the server's connections. Raise that as far as permitted, and
    return how many connections leave enough for everything else, above all the engine."""
    wanted = connections + handshakes + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return connections
    admitted = min(connections, max(allowed // 2, allowed - handshakes - _OTHER_FILES))
    _log.warning(
        "%d open files are permitted, too few for limits.connections = %d, so %d are admitted: raise the limit of this "
        "process (ulimit -Hn, LimitNOFILE=), or lower limits.connections",
        allowed,
        connections,
        admitted,
    )
    return admitted


def _prepare_logs(settings: Settings) -> None:
    """Log lines go to stderr: JSON for machines, or text for people. The level stays as it is."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JSONFormatter() if settings.log == "json" else text)
    for name in ("leasehold", "uvicorn", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
    # Whether new keys and certificates are in force is what an operator who changed them wants to know.
    logging.getLogger("leasehold.server.files").setLevel(logging.INFO)


def check(settings: Settings) -> None:
    """Read what `serve` would read. Connects to no server. Raises ConfigError."""
    Authenticator.open(settings)
    if settings.tls is not None:
        Certificates(settings.tls)
    _peers(settings)
    Service(EngineConfig.parse(settings.engine, settings.call_timeout))
    if settings.otel:
        with spans.from_environment(os.environ, ""):
            pass


def _peers(settings: Settings) -> list[Peer]:
    return [peer for url in settings.peers for peer in Peer.parse(url)]


async def _serve(
    settings: Settings,
    sockets: list[socket.socket],
    on_started: Callable[[], None],
    worker: Worker | None,
    instance: str,
) -> None:
    authenticator = Authenticator.open(settings)
    certificates = None if settings.tls is None else Certificates(settings.tls)
    service = Service(EngineConfig.parse(settings.engine, settings.call_timeout))

    def refresh(force: bool = False) -> None:
        authenticator.refresh(force=force)
        if certificates is not None:
            certificates.refresh(force=force)

    async def refresh_often() -> None:
        while True:
            await asyncio.sleep(_REFRESH_INTERVAL)
            refresh()
            if (found := health.health) is not None:
                app.history.record_leader(found.has_leader, service.runtime.wall())

    async with contextlib.AsyncExitStack() as stack:
        audit = None
        if settings.audit_file is not None:
            audit = Audit(stack.enter_context(AuditFile(settings.audit_file)), settings.audit_required)
        reading = ReadOptions(settings.picture_max_age, _peers(settings), instance)
        traced = None
        if settings.otel:
            traced = stack.enter_context(spans.from_environment(os.environ, service.config.scheme))
        app = App(service, authenticator, Limits(settings.limits), audit, reading, traced)
        config = _uvicorn_config(app, settings)
        config.load()
        await service.start()
        health = stack.enter_context(contextlib.closing(EngineHealth(settings.engine, addresses=False)))
        app.metrics.sources.append(health)
        app.dashboard.health = lambda: health.health
        app.dashboard.admin, app.dashboard.secure = settings.admin, settings.tls is not None
        app.dashboard.trace_url = settings.trace_url
        if settings.demo:
            app.dashboard.demo = True
            await stack.enter_async_context(ExampleTraffic(app).running())
        server = Server(config, app, certificates, on_started, lambda: refresh(force=True))
        if worker is not None:
            relay = service.relay = WorkerRelay(worker, service, app.feed)
            relay.start()
            stack.callback(relay.close)
            worker.watch_parent(lambda: server.handle_exit(signal.SIGTERM, None))
        refreshing = asyncio.get_running_loop().create_task(refresh_often())
        try:
            await server.serve(sockets)
        finally:
            refreshing.cancel()
            await service.stop()


def _uvicorn_config(app: App, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_for(Rules.of(settings, app)),  # type: ignore[arg-type]  # it wants a class, and only calls it
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
        # Longer than any attempt lasts: uvicorn then cancels requests, and an attempt must not be cancelled.
        timeout_graceful_shutdown=round(max(_DRAIN_SECONDS, settings.call_timeout + 5)),
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )


def listen(address: str, mode: int = 0o600) -> socket.socket:
    """A listening socket for an address of the settings; `mode` is for the file of a Unix socket. Raises
    ConfigError."""
    try:
        if address.startswith("unix:"):
            return _listen_unix(address.removeprefix("unix:"), mode)
        host, port = split_address(address)
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _bind(socket.socket(family, kind, protocol), where)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from error


def _listen_unix(path: str, mode: int) -> socket.socket:
    """A socket file that a server left behind is replaced. One that another server serves, or another file, is not."""
    folder_path, name = os.path.split(path)
    with files.open_folder(folder_path) as folder:
        if sys.platform == "linux":  # in the folder that is open, even if another user swaps its path
            path = f"/proc/self/fd/{folder.fd}/{name}"
        found = folder.find(name)
        if found is not None and stat.S_ISSOCK(found.st_mode) and not _is_served(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder.fd)
        before = os.umask(0o777 & ~mode)  # there is no moment at which other users could connect
        try:
            return _bind(socket.socket(socket.AF_UNIX), path)
        finally:
            os.umask(before)


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a server that accepts no connections must not hold up this one
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            return True
    return True


def _bind(sock: socket.socket, where: Any) -> socket.socket:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # connections have that of their listener
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def shown_address(address: str, sock: socket.socket, tls: bool) -> str:
    """An address of the settings, with the port that the system chose."""
    if sock.family == socket.AF_UNIX:
        return address
    host, port = sock.getsockname()[:2]
    return f"{'https' if tls else 'http'}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
