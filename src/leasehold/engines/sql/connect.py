"""Name resolution in a thread, and how the time left is divided among a server's addresses."""

from __future__ import annotations

import socket
from contextlib import suppress

from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime


def split_deadline(runtime: Runtime, deadline: float, parts: int) -> float:
    """The instant by which the first of `parts` has used its equal share of the time left."""
    now = runtime.now()
    return now + (deadline - now) / parts


async def resolve(host: str, runtime: Runtime, deadline: float, server: str, engine: str) -> list[str]:
    """The addresses of a host. Raises `Unavailable` if there are none, or none by the deadline.

    A driver would resolve the name without a deadline, block the event loop meanwhile, and spend all the time on the
    first address if that does not answer."""
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

    try:
        runtime.start_thread(look_up, "leasehold-look-up")
    except RuntimeError:  # the interpreter exits, and this is the watchdog's thread, which has releases to send
        await look_up(runtime)
    await signal.wait(deadline - runtime.now())
    if not answer:
        raise Unavailable(f"{server}: host {host} was not resolved before the deadline", engine=engine)
    if isinstance(answer[0], OSError):
        raise Unavailable(f"{server}: cannot resolve host {host}: {answer[0].strerror}", engine=engine)
    return list(dict.fromkeys(answer[0]))


def _is_ip_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False
