"""Wake-ups by LISTEN: the address names a NOTIFY channel and, by its hash, an advisory lock (`lh_reachable_v1`).

Notifications carry the id hashes of claims, so the channel must stay secret. Every role can read the numbers of locks
in `pg_locks`: so the lock's number is a hash of the address.
"""

from __future__ import annotations

import json
from typing import Final
from weakref import ReferenceType

from leasehold.core.timing import WAKEUP_SLACK
from leasehold.engines.postgresql import connect
from leasehold.engines.postgresql.errors import ENGINE
from leasehold.engines.postgresql.session import PgSession
from leasehold.engines.postgresql.url import PgTarget
from leasehold.engines.registry import ClaimRegistry, RecheckTimer
from leasehold.engines.sql import listener
from leasehold.engines.sql.session import SqlSession
from leasehold.runtime.base import Runtime

_MAX_WAIT: Final = 3600.0
_LISTEN: Final = (
    "listen lh_{address}; "
    "select pg_catalog.pg_advisory_lock(('x' || pg_catalog.left("
    "pg_catalog.encode(pg_catalog.sha256('{address}'), 'hex'), 16))::bit(64)::bigint)"
)


class PgListener(listener.SqlListener):
    _not_direct = "a connection pooler is in between; pass listen_url=URL (direct to the server) or listen=no"
    _other_server = "listen_url points to another server or to another database"

    def __init__(self, target: PgTarget | None, registry: ClaimRegistry, runtime: Runtime) -> None:
        super().__init__(registry, runtime, ENGINE, enabled=target is not None)
        self._target = target

    async def _open(self, runtime: Runtime, deadline: float) -> PgSession:
        assert self._target is not None  # noqa: S101  # for the type checker
        return await connect.open_session(self._target, runtime, deadline, 0.0)

    async def _start_listening(
        self, session: SqlSession, address: str, runtime: Runtime, deadline: float
    ) -> listener.ListenLoop:
        assert isinstance(session, PgSession)  # noqa: S101  # for the type checker
        await session.run(_LISTEN.format(address=address), deadline)
        session.enable_shutdown()

        async def listen_loop(runtime: Runtime, registry: ReferenceType[ClaimRegistry]) -> None:
            session.set_runtime(runtime)
            timer = RecheckTimer()
            while True:
                seconds = timer.next_due() - runtime.now()
                payloads = await session.next_notifications(max(0.0, min(seconds, _MAX_WAIT)))
                if (strong_ref := registry()) is not None:
                    now = runtime.now()
                    for payload in payloads:
                        _deliver_payload(strong_ref, payload, timer, now)
                    timer.wake_due(strong_ref, now)
                del strong_ref

        return listen_loop


def _deliver_payload(registry: ClaimRegistry, payload: bytes, timer: RecheckTimer, now: float) -> None:
    try:
        kind, id_hash, after_us, namespace, name = json.loads(payload)
        seconds = int(after_us) / 1_000_000  # never NaN
    except (ValueError, TypeError, OverflowError, RecursionError):
        return  # not sent by Leasehold
    if kind == "recheck" and isinstance(id_hash, str):
        timer.schedule(registry, id_hash, now + seconds + WAKEUP_SLACK)
        return
    listener.deliver_notification(registry, kind, id_hash, seconds, namespace, name)
