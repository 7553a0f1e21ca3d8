"""Name resolution, and how the time left is divided among a server's addresses."""

from __future__ import annotations

from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime
from leasehold.runtime.net import host_names


def split_deadline(runtime: Runtime, deadline: float, parts: int) -> float:
    """The instant by which the first of `parts` has used its equal share of the time left."""
    now = runtime.now()
    return now + (deadline - now) / parts


async def resolve(host: str, runtime: Runtime, deadline: float, server: str, engine: str) -> list[str]:
    """The addresses of a host. Raises `Unavailable` if there are none, or none by the deadline.

    A driver would resolve the name without a deadline, block the event loop meanwhile, and spend all the time on the
    first address if that does not answer."""
    try:
        return await host_names.resolve(host, runtime, deadline)
    except OSError as error:
        raise Unavailable(f"{server}: cannot resolve host {host}: {error.strerror}", engine=engine) from error
