"""The health of the lock servers in a URL: each is asked for a round trip to its engine, with the client's API key."""

from __future__ import annotations

from typing import Final

from leasehold.config import EngineConfig
from leasehold.engines.probe import Finding, Health, MemberHealth, describe_down, probe_each, timed
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.remote import wire
from leasehold.engines.remote.connections import new_connections
from leasehold.engines.remote.servers import Server, Servers
from leasehold.engines.remote.url import parse_url
from leasehold.runtime.base import Runtime

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
        return MemberHealth(str(server.address), up=True, round_trip=trip.seconds, findings=_findings(servers, server))

    try:
        members = await probe_each(servers.all, probe, lambda server: str(server.address), runtime, deadline)
    finally:
        connections.close()
    up = any(member.up for member in members)
    return Health(config.scheme, up=up, members=members, error=None if up else describe_down(members))


def _findings(servers: Servers, server: Server) -> tuple[Finding, ...]:
    if not servers.authorization or server.tls is not None or server.address.host.startswith(_LOOPBACK):
        return ()
    advice = "the API key is sent in clear text: use https://, or a network that encrypts"
    return (Finding("scheme", "http", advice),)
