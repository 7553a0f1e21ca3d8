"""A Leasehold server as a process of its own: `leasehold serve` over an engine's URL."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

from harness.servers.folders import scratch
from harness.servers.process import Server, free_ports


class LockServer(Server):
    """`arguments` are flags of `leasehold serve`."""

    package: ClassVar[str] = "leasehold[server]"

    def __init__(self, url: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(scratch(), free_ports(1)[0])
        self._url, self._arguments, self._environment = url, arguments, environment or {}

    def command(self) -> Sequence[str]:
        listen = f"127.0.0.1:{self.port}"
        return [sys.executable, "-m", "leasehold", "-u", self._url, "serve", "--listen", listen, *self._arguments]

    def environment(self) -> Mapping[str, str]:
        return self._environment

    def ready(self) -> bool:
        """By its own line, so that it works with TLS too."""
        with open(self.log, "rb") as log:
            return b"listening on http" in log.read()

    def launch(self) -> None:
        with open(self.log, "wb"):  # empty: the line of an earlier start must not count
            pass
        super().launch()

    def probe(self, path: str = "/readyz") -> int:
        """The status of a GET. Raises OSError if the server does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()


def url_of(*servers: LockServer, scheme: str = "http") -> str:
    """The URL of a client that knows all these servers."""
    return f"{scheme}://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
