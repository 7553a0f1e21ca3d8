"""What tests change inside the servers and proxies of `harness/`."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import Any

import pytest

from harness.servers import folders
from harness.servers.proxy import Proxy


def hold_back(proxy: Proxy, text: bytes) -> list[Callable[[], Any]]:
    """Hold back the requests of one client from the first one with this text on. Calling the item of the returned list
    forwards them."""
    held: list[Callable[[], Any]] = []
    forward = proxy._forward

    def forward_unless_held(connection: Any, side: socket.socket) -> None:
        if side is connection.client_side and not held and text in side.recv(65_536, socket.MSG_PEEK):
            proxy._selector.unregister(side)
            held.append(lambda: proxy._selector.register(side, selectors.EVENT_READ, connection))
        else:
            forward(connection, side)

    proxy._forward = forward_unless_held  # type: ignore[method-assign]
    return held


def delayed_requests(proxy: Proxy) -> list[Any]:
    """Those that the proxy has received and will forward later."""
    return proxy._delayed


def set_free_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """As if the machine had this many bytes left."""
    monkeypatch.setattr(folders, "_free_memory", lambda: free)
