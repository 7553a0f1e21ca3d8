"""What tests read and change inside the lock server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from leasehold.model import Claim
from leasehold.server import calls, incidents, listener, queries, run, workers
from leasehold.server.app import App
from leasehold.server.dashboard import stream
from leasehold.server.dashboard.page_data import Steady
from leasehold.server.dashboard.routes import Dashboard
from leasehold.server.dashboard.stream import Streams
from leasehold.server.history import History
from leasehold.server.limits import Bodies, Limits
from leasehold.server.listener import Listener
from leasehold.server.picture import Pictures
from leasehold.server.protocol import Protocol
from leasehold.server.routes import Stream
from leasehold.server.service import Service
from tests.support.probe import Place

ACCEPT_PAUSE = Place(listener, "_PAUSE")  # after a connection could not be accepted
KEEP_CHANNEL = Place(stream, "_KEEP_CHANNEL")  # seconds without a tab
MAX_UNSENT = Place(workers, "_MAX_UNSENT")  # of a worker for another one that does not read
PAGE_BYTES = Place(calls, "_PAGE_BYTES")  # of one page of a listing

# Steps that tests watch, or during which they do harm.
CONTEXT = Place(Dashboard, "_context")  # makes the data of a page
FRAME = Place(Dashboard, "_frame")  # renders a page
IS_SERVED = Place(run, "_is_served")  # whether a process listens at a Unix socket
NEW_OWNER = Place(incidents, "_new_owner")
PASS_ON = Place(App, "_pass_on")  # an event, to the feed, the metrics and the audit file

make_page = calls._page
verbs_of_calls = calls._VERBS

read_cursor = queries._read_cursor
make_locks_page = queries._page


# --------------------------------------------------------------- the service


def waiting(service: Service) -> Mapping[str, Any]:
    """What is inside the engine's `wait`, by id hash."""
    return service._waiting


def attempts(service: Service) -> Mapping[str, Any]:
    """Those under way, by id hash."""
    return service._attempts


def routes_by_client(service: Service) -> Mapping[Any, set[str]]:
    return service._routes_of


def disown(service: Service, claim: Claim) -> None:
    """As when another server has the claim now."""
    service._disown(claim)


def disown_expired(service: Service) -> None:
    service._disown_expired()


async def send_heartbeats(service: Service) -> None:
    await service._send_heartbeats()


# ----------------------------------------------------------------- its limits


def counted_calls(limits: Limits) -> int:
    """For how many names and namespaces the server counts calls."""
    return len(limits._calls)


def shared_calls(limits: Limits) -> tuple[int, dict[str, int]]:
    """How many calls count for the limit of all keys, and how many each key has."""
    return limits._shared.total, limits._shared._calls


def counted_waiters(limits: Limits) -> int:
    return len(limits._waiters)


def counted_connections(limits: Limits) -> dict[str, int]:
    return limits._connections


def has_list(limits: Limits, who: str) -> bool:
    """Whether a list of this caller is made, or waits for its turn."""
    return who in limits._lists


def has_batch(limits: Limits, who: str) -> bool:
    return who in limits._batches or who in limits._under_way or who in limits._fewer


def bytes_by_caller(bodies: Bodies) -> dict[str, int]:
    return bodies._of


# ----------------------------------------------------------- its connections


def accept(listener: Listener) -> None:
    """As when a connection waits."""
    listener._accept()


def opening_connections(listener: Listener) -> int:
    """How many connections were accepted, and have not ended their TLS handshake."""
    return len(listener._opening)


def is_in_head(protocol: Protocol) -> bool:
    """Whether a part of a request's head has come."""
    return protocol._in_head


def is_in_body(protocol: Protocol) -> bool:
    return protocol._in_body


def read_timer(protocol: Protocol) -> Any:
    """What ends the connection if the rest of the head or body does not come."""
    return protocol._timer


def unsent_bytes(protocol: Protocol) -> int:
    """Of an answer that its caller does not read as fast as it comes; 0: it does."""
    return protocol.transport.get_write_buffer_size() if protocol._write_timer is not None else 0


def let_write_time_pass(protocol: Protocol) -> bool:
    """As if `write_seconds` had passed since the caller stopped reading, or since the last call; False: it reads.

    From any thread but the loop's own. All of it happens in the loop: the connection may end at any moment.
    """

    async def pass_time() -> bool:
        if (timer := protocol._write_timer) is None:
            return False
        timer.cancel()
        protocol._check_reading()
        return True

    return asyncio.run_coroutine_threadsafe(pass_time(), protocol.loop).result(10)


def reads_no_more(protocol: Protocol) -> bool:
    """Whether the connection closes after the answer under way."""
    return protocol._refused


def names_until(protocol: Protocol) -> float:
    """When the client's certificate expires, and with it the names that it proves."""
    return protocol._names_until


def set_names_until(protocol: Protocol, at: float) -> None:
    protocol._names_until = at


def unsent(stream: Stream[Any]) -> list[Any]:
    """What the stream has not sent yet."""
    return stream._unsent


# ---------------------------------------------------------- what it remembers


def remembered_names(history: History) -> int:
    return len(history._names)


def remembered_lives(history: History) -> Any:
    """Of grants, by namespace and fingerprint."""
    return history._lives


def remembered_losses(history: History) -> int:
    """Of how many holders the losses are counted."""
    return len(history._losses)


def remembered_grants(history: History, namespace: str) -> int:
    """How many grants of this namespace's names are kept."""
    return history._grants[namespace]


def incident_namespaces(history: History) -> int:
    return len(history._incidents)


def counted_rows(history: History) -> set[Any]:
    """What the last hour's statistics count, each kind of event of each group once."""
    return {row for column in history.hour._columns.values() for row in column.counts}


def kept_snapshot(pictures: Pictures, namespace: str) -> Any:
    """The list of all claims that was read last, if it is still kept."""
    return pictures._entries[namespace].snapshot


# -------------------------------------------------------------- the dashboard


def channels(streams: Streams) -> dict[Any, Any]:
    """What is rendered for open tabs: one for each page and reader."""
    return streams._channels


def tabs(streams: Streams) -> set[Any]:
    return streams._tabs


def kept_instants(steady: Steady) -> int:
    """How many instants are kept so that a page shows them unchanged."""
    return len(steady._known) + len(steady._before)
