"""Where a server is: its addresses, looked up by a thread, and how much of the time left each may have."""

from __future__ import annotations

import socket
from contextlib import suppress

from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime


def split_deadline(runtime: Runtime, deadline: float, parts: int) -> float:
    """When the first of so many has had its equal share of the time left."""
    now = runtime.now()
    return now + (deadline - now) / parts


async def resolve(host: str, runtime: Runtime, deadline: float, server: str, engine: str) -> list[str]:
    """The addresses of a host. A driver would look them up for as long as that takes, and stop the loop; and it would
    wait for the first that is silent."""
    if _is_ip_address(host):
        return [host]
    answer: list[list[str] | OSError] = []
    signal = runtime.signal()

    async def look_up(_: Runtime) -> None:
        try:
            answer.append([str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)])
        except OSError as error:
            answer.append(error)
        signal.set()

    runtime.start_thread(look_up, "leasehold-look-up")
    await signal.wait(deadline - runtime.now())
    if not answer:
        raise Unavailable(f"{server}: the address of {host} was not found in time", engine=engine)
    if isinstance(answer[0], OSError):
        raise Unavailable(f"{server}: {host} has no address: {answer[0].strerror}", engine=engine)
    return list(dict.fromkeys(answer[0]))


def _is_ip_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False
