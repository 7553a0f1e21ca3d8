"""What stands in the lines, for people. Nothing is decided by it, and nothing is changed.

Not one moment's picture: lines are read one flight after the other. Ages are by the leader's clock as last seen by this
client, or, if it never wrote anything, by its own.
"""

from __future__ import annotations

from typing import Any, Final

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import GetChildren, GetData, Sync

from leasehold.core.names import owner
from leasehold.core.timing import BEAT
from leasehold.engines.zookeeper import nodes, slots
from leasehold.engines.zookeeper.line import line_of
from leasehold.engines.zookeeper.nodes import BASE, ROOT, Line
from leasehold.engines.zookeeper.session import Session
from leasehold.engines.zookeeper.wire import Reply
from leasehold.model import Holder, Holding
from leasehold.runtime.base import Runtime

_BATCH: Final = 200  # requests in one flight
_UNKNOWN: Final = Holder("unknown")


async def holdings(
    session: Session, runtime: Runtime, namespace: str, prefix: str, exact: bool, deadline: float
) -> list[Holding]:
    async def ask(requests: list[Any]) -> list[Reply]:
        found: list[Reply] = []
        for start in range(0, len(requests), _BATCH):
            found += await session.flight(runtime, requests[start : start + _BATCH], deadline)
        return found

    root = session.address.chroot + ROOT
    # The sync is for a follower that is behind: what was answered to anybody before this is to be seen.
    _, listed, base = await ask([Sync(root), GetChildren(root, None), GetData(session.address.chroot + BASE, None)])
    offset = nodes.base_of((base.get(NoNodeError) or (b"0", None))[0])
    named = (nodes.name_of(namespace, line) for line in listed.get(NoNodeError) or ())
    names = sorted(name for name in named if name and (name == prefix if exact else name.startswith(prefix)))
    found: list[Holding] = []
    children = await ask([GetChildren(line_of(session, namespace, name), None) for name in names])
    for name, reply in zip(names, children, strict=True):
        line, parent = Line(reply.get(NoNodeError) or ()), line_of(session, namespace, name)
        if not line.nodes:
            continue
        given, *looks = await ask([GetData(parent, None), *(GetData(f"{parent}/{n.name}", None) for n in line.nodes)])
        numbered = {mark: slot for slot, (mark, _) in enumerate(slots.read((given.get(NoNodeError) or (b"", None))[0]))}
        now = session.skew + runtime.now() if session.skew else runtime.wall()
        for at, (node, look) in enumerate(zip(line.nodes, looks, strict=True)):
            data, stat = look.get(NoNodeError) or (b"", None)
            if stat is None:
                continue
            told, holds = nodes.read(data), line.holds(at)
            kind, limit = node.meant
            found.append(
                Holding(
                    namespace=namespace,
                    name=name,
                    state=("reserved" if told.waits else "held") if holds else "waiting",
                    mode=nodes.mode_of(node),
                    kind=kind,
                    limit=limit,
                    fingerprint=node.mark[:16],
                    holder=told.holder or _UNKNOWN,
                    age=max(0.0, now - stat.ctime / 1000),
                    left=max(0.0, min(told.ttl, told.ttl - (now - stat.mtime / 1000))) if holds else BEAT,
                    token=offset + stat.czxid if holds else None,
                    slot=numbered.get(node.mark) if holds and kind == "semaphore" else None,
                    place=None if holds else line.place(at),
                    owner=owner(node.mark),
                )
            )
    return found
