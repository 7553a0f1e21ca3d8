"""The health of the lock servers in a URL: each is asked for a round trip to its engine, with the client's API key."""

from __future__ import annotations

import re
from typing import Final

from leasehold.config import EngineConfig
from leasehold.engines.probe import (
    Health,
    MemberHealth,
    WeakSetting,
    certificate_left,
    describe_down,
    fetch_text,
    probe_each,
    timed,
)
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.remote import wire
from leasehold.engines.remote.connections import new_connections
from leasehold.engines.remote.servers import Server, Servers
from leasehold.engines.remote.url import parse_url
from leasehold.runtime.base import Runtime

_ENGINE: Final = re.compile(r'^leasehold_server_breaker_state\{engine="([a-z0-9+.-]{1,40})"\} ', re.MULTILINE)
_METRICS_SHARE: Final = 0.5  # of the time left: the server may have to list locks first
_LOOPBACK: Final = ("127.", "localhost", "::1")


async def health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    servers = Servers(parse_url(config))
    registry = ClaimRegistry(runtime, runtime.random_bytes(8).hex())
    connections = new_connections(runtime, registry, config.scheme)

    async def ping(server: Server, until: float) -> None:
        answer = await connections.call(server, {"do": "ping"}, until)
        if "problem" in answer:
            raise wire.error_from_problem(answer["problem"], config.scheme)
        wire.traits_answer_from_json(answer)

    async def probe(server: Server, until: float) -> MemberHealth:
        await ping(server, until)  # connects
        _, trip = await timed(runtime, lambda: ping(server, until))
        return MemberHealth(
            str(server.address),
            up=True,
            round_trip=trip.seconds,
            certificate_left=await certificate_left(server.address, server.tls, runtime, until),
            engine=await _engine_behind(servers, server, runtime, until),
            anonymous=not servers.authorization and server.tls is None,  # with TLS, certificates may be the keys
            findings=_findings(servers, server),
        )

    try:
        members = await probe_each(servers.all, probe, lambda server: str(server.address), runtime, deadline)
    finally:
        connections.close()
    up = any(member.up for member in members)
    return Health(config.scheme, up=up, members=members, error=None if up else describe_down(members))


async def _engine_behind(servers: Servers, server: Server, runtime: Runtime, deadline: float) -> str | None:
    """As the server's metrics name it. None: a proxy does not pass them on, or they do not come in time."""
    head = f"GET {servers.url.base}/metrics HTTP/1.0\r\nHost: {server.address}\r\n{servers.authorization}\r\n"
    until = deadline - (deadline - runtime.now()) * (1 - _METRICS_SHARE)
    try:
        text = await fetch_text(server.address, server.tls, head.encode(), runtime, until)
    except OSError:
        return None
    found = _ENGINE.search(text)
    return found[1] if found else None


def _findings(servers: Servers, server: Server) -> tuple[WeakSetting, ...]:
    if not servers.authorization or server.tls is not None or server.address.host.startswith(_LOOPBACK):
        return ()
    advice = "the API key is sent in clear text: use https://, or a network that encrypts"
    return (WeakSetting("scheme", "http", advice),)
