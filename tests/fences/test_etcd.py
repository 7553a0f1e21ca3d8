"""Behaviour specific to etcd, and responses that are not from etcd."""

from __future__ import annotations

import socket
import socketserver
import threading

import pytest

from leasehold import ConfigError, StaleToken, Unavailable, fences
from tests.support.fixed_response import serve_response


def test_etcd_txn_writes_several_keys_or_none(resource):
    number = resource("etcd")
    fence, key = number.fence, number.key
    assert len(fence.txn(5, fence.put(f"{key}-a", "1"), fence.put(key, b"7"))) == 2
    with pytest.raises(StaleToken):
        fence.txn(4, fence.delete(key), fence.put(f"{key}-a", "2"))
    assert number.tool("get", "--print-value-only", "--prefix", key).split() == ["7", "1", "0000000000000005"]
    fence.txn(5, fence.delete(f"{key}-a"))
    assert fence.read(6) == b"7"


def test_etcd_fence_with_missing_key_or_unreachable_members(resource):
    number = resource("etcd")
    endpoint = f"http://127.0.0.1:{number.spec['etcd']}"
    fence = fences.EtcdFence(endpoint, f"/new/{number.spec['run']}")
    assert fence.read(5) is None
    with pytest.raises(StaleToken):
        fence.write(4, "too old: a read of nothing is a read")
    fence.write(5, "")
    assert fence.read(5) == b""
    with pytest.raises(Unavailable, match="cannot connect to any etcd member"):
        fences.EtcdFence("http://127.0.0.1:1", "a").claim(5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it may still apply the request: no other is tried
        endpoints = [f"http://127.0.0.1:{silent.getsockname()[1]}", endpoint]
        with pytest.raises(Unavailable, match="did not answer"):
            fences.EtcdFence(endpoints, "a", timeout=0.2).claim(5)
    for bad in ("127.0.0.1:2379", [], "etcd://a"):
        with pytest.raises(ConfigError):
            fences.EtcdFence(bad, "a")
    with pytest.raises(ConfigError, match="etcd refused"):
        fence.txn(5, {"request_put": {"key": "not base64!"}})


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b"{}", b'{"succeeded": true}', b'{"responses": [7]}', b"[" * 100_000]
)
def test_invalid_etcd_response_is_unavailable(body):
    with serve_response(body=body) as server, pytest.raises(Unavailable):
        fences.EtcdFence(server.url, "a").read(5)


def test_truncated_etcd_response_is_unavailable():
    class TruncatingHandler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65_536)
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}")

    with socketserver.TCPServer(("127.0.0.1", 0), TruncatingHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(Unavailable):
            fences.EtcdFence(f"http://127.0.0.1:{server.server_address[1]}/", "a").write(5, "x")
