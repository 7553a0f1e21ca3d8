"""The merged history of several servers of one engine.

Each server knows what went through it. Live state needs no peers: it comes from the engine. So a server asks its peers
for their part when a reader wants history, merges the answers, and says which peers did not answer.

What peers say is shown and never used for a decision. A peer that does not answer costs a reader at most
`PEER_SECONDS`, and is not asked again for `PAUSE` seconds. A list of peers may contain the server itself, so that all
servers can have the same list: it recognises its own answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar, cast
from urllib.parse import urlencode

import msgspec

from leasehold.config import EngineConfig
from leasehold.engines.remote.parsing import Response, ResponseParser
from leasehold.engines.remote.url import RemoteUrl, parse_url, read_api_key
from leasehold.errors import ConfigError
from leasehold.runtime.net.blocking import SocketAddress
from leasehold.runtime.net.event_loop import connect_in_loop
from leasehold.server import merging, schemas
from leasehold.server.auth import Caller
from leasehold.server.history import History
from leasehold.server.keys import ANY_NAMESPACE
from leasehold.server.past import Incident, Owner, PastGrant, PastWait, Stats
from leasehold.server.picture import Picture, Who

S = TypeVar("S", bound=schemas.OfServer)
T = TypeVar("T")

PEER_SECONDS: Final = 1.0  # for one answer of a peer
PAUSE: Final = 2.0  # seconds until a peer that did not answer is asked again
MAX_ANSWER_AGE: Final = 1.0  # seconds for which an answer is shown
_MAX_ANSWERS: Final = 100  # kept
_MAX_BODY: Final = 8 * 1024 * 1024  # bytes of one

_log = logging.getLogger("leasehold.server")


class Merged(NamedTuple, Generic[T]):
    """What this server and its peers know. `missing`: peers that did not answer."""

    value: T
    missing: list[str]


class NamePast(NamedTuple):
    """Latest first."""

    grants: list[PastGrant]
    waits: list[PastWait]


@dataclass(slots=True)
class Peer:
    """One other server of the same engine."""

    url: RemoteUrl
    address: SocketAddress
    failed_at: float = field(default=float("-inf"))

    @classmethod
    def parse(cls, url: str) -> list[Peer]:
        """The servers of a URL, which is written as for clients. Raises ConfigError."""
        config = EngineConfig.parse(url, PEER_SECONDS)
        if config.scheme not in ("http", "https"):
            raise ConfigError("a peer is the http:// or https:// URL of another server of the same engine")
        parsed = parse_url(config)
        read_api_key(parsed)
        return [cls(parsed, address) for address in parsed.addresses]

    def __str__(self) -> str:
        return str(self.address)

    async def get(self, path: str, kind: type[S]) -> S | None:
        """Its answer; None: there is none."""
        now = time.monotonic()
        if now < self.failed_at + PAUSE:
            return None
        try:
            answer = await self._ask(path)
            if answer.status == 200:
                return msgspec.json.decode(answer.body, type=kind)
            why = f"status {answer.status}"
        except (OSError, ValueError, msgspec.DecodeError) as error:  # ConfigError and bad UTF-8 are ValueErrors
            why = str(error) or type(error).__name__
        if self.failed_at < now - 60 * PAUSE:
            _log.warning("the peer %s did not answer: its part of the history is not shown: %s", self, why)
        self.failed_at = time.monotonic()
        return None

    async def _ask(self, path: str) -> Response:
        deadline, parser = time.monotonic() + PEER_SECONDS, ResponseParser()
        parser.max_body = _MAX_BODY
        key = read_api_key(self.url)  # each time: it may have been replaced
        head = [f"GET {self.url.base}{path} HTTP/1.1", f"Host: {self.address}", "Connection: close"]
        if key:
            head.append(f"Authorization: Bearer {key}")
        stream = await connect_in_loop(self.address, self.url.tls, parser, time.monotonic, deadline)
        try:
            response: Response = await stream.call("\r\n".join([*head, "", ""]).encode(), deadline)
        finally:
            stream.close()
        return response


class Peers:
    """The history of this server and of its peers."""

    def __init__(self, history: History, peers: Sequence[Peer] = (), instance: str = "") -> None:
        self._history, self._peers = history, list(peers)
        self._numbers = {str(peer): f"peer {number}" for number, peer in enumerate(peers, 1)}
        self.instance = instance  # names this server, the same in all its workers
        self._answers: OrderedDict[str, tuple[float, asyncio.Task[Merged[list[object]]]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def names_for(self, caller: Caller) -> Callable[[str], str]:
        """What a caller sees of a peer's address: only its number in the list of peers, unless the caller may read
        everything. An empty text, which is this server, stays empty."""
        if caller.may_list(ANY_NAMESPACE, ""):
            return str
        return lambda address: self._numbers.get(address, "")

    async def past(self, namespace: str, name: str, *, local: bool = False) -> Merged[NamePast]:
        """The grants and waits of a name. `local`: those of this server alone, here and below."""
        path = f"/v1/history?{_query(namespace=namespace, name=name)}"
        answers, missing = await self._ask_all(path, schemas.NameHistory, local)
        grants = merging.grants([self._history.records(namespace, name), *(each.grants for each in answers)], local)
        waits = merging.waits([self._history.waits(namespace, name), *(each.waits for each in answers)])
        return Merged(NamePast(grants, waits), missing)

    async def incidents(self, namespace: str | None = None, *, local: bool = False) -> Merged[list[Incident]]:
        """Latest first; None: of all namespaces. All of them, as a caller may see some only."""
        given = {"limit": schemas.MAX_HOLDINGS} | ({} if namespace is None else {"namespace": namespace})
        answers, missing = await self._ask_all(f"/v1/incidents?{_query(**given)}", schemas.Incidents, local)
        found = merging.incidents([self._history.incidents(namespace), *(each.incidents for each in answers)])
        return Merged(found, missing)

    async def stats(self, namespace: str, seconds: float, *, local: bool = False) -> Merged[Stats]:
        own = self._history.stats(namespace, seconds)
        path = f"/v1/stats?{_query(namespace=namespace, seconds=round(seconds))}"
        answers, missing = await self._ask_all(path, schemas.StatsAnswer, local)
        return Merged(merging.stats(own, [each.stats for each in answers]), missing)

    async def owners(
        self,
        picture: Picture,
        most: int | None = None,
        fits: Callable[[Who], bool] | None = None,
        *,
        local: bool = False,
    ) -> Merged[list[Owner]]:
        """The holders of a picture, all or the first, with what all servers know about them."""
        path = f"/v1/owners?{_query(namespace=picture.namespace, **({} if most is None else {'limit': most}))}"
        answers, missing = await self._ask_all(path, schemas.Owners, local)
        own = self._history.owners(picture, most, fits)
        return Merged(merging.owners(own, [each.owners for each in answers]), missing)

    # ------------------------------------------------------------------- asking

    async def _ask_all(self, path: str, kind: type[S], local: bool) -> tuple[list[S], list[str]]:
        """The answers of the peers, which many readers share for a second, and the peers without one."""
        if local or not self._peers:
            return [], []
        now = time.monotonic()
        known = self._answers.get(path)
        if known is None or now > known[0] + MAX_ANSWER_AGE:
            asking = asyncio.ensure_future(self._ask_now(f"{path}&local=1", kind))
            known = self._answers[path] = (now, asking)
            if len(self._answers) > _MAX_ANSWERS:
                self._answers.popitem(last=False)
        self._answers.move_to_end(path)
        answers, missing = await asyncio.shield(known[1])
        return cast("list[S]", answers), missing

    async def _ask_now(self, path: str, kind: type[S]) -> Merged[list[object]]:
        found: list[object] = []
        missing: list[str] = []
        peers = list(self._peers)
        for peer, answer in zip(peers, await asyncio.gather(*[peer.get(path, kind) for peer in peers]), strict=True):
            if answer is None:
                missing.append(str(peer))
            elif answer.server == self.instance:  # this server itself
                self._peers = [each for each in self._peers if each is not peer]
            else:
                answer.name_server(str(peer))
                found.append(answer)
        return Merged(found, missing)


def _query(**arguments: object) -> str:
    return urlencode(arguments)
