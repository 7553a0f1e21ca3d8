"""How the client of each engine begins TLS: its URL, and what the server says before that."""

from __future__ import annotations

from typing import Final, NamedTuple


class TlsClient(NamedTuple):
    url: str  # with {port} and {certificate}, that of the authority it trusts
    greeting: bytes  # of the server, before TLS begins
    verifying: str = ""  # to be added to the URL of a client that verifies the certificate by that authority


TLS_CLIENTS: Final = {
    "redis": TlsClient("rediss://127.0.0.1:{port}", b"", "?ssl_ca_certs={certificate}"),
    "redlock": TlsClient(
        "redlock://127.0.0.1:{port},localhost:{port},127.0.0.2:{port}?tls=yes", b"", "&ssl_ca_certs={certificate}"
    ),
    "etcd": TlsClient("etcds://127.0.0.1:{port}", b"", "?ca={certificate}"),
    "http-memory": TlsClient("https://127.0.0.1:{port}", b"", "?ca={certificate}"),
    "zookeeper": TlsClient("zookeeper://127.0.0.1:{port}?tls=yes", b"", "&ca={certificate}"),
    "postgresql": TlsClient(
        "postgresql://127.0.0.1:{port}/leasehold?sslmode=require",
        b"S",
        "&sslmode=verify-full&sslrootcert={certificate}",
    ),
    "mysql": TlsClient(
        "mysql://127.0.0.1:{port}/leasehold?ssl_ca={certificate}",
        # The greeting of a server that offers TLS.
        b"\x49\0\0\0\x0a8.0.0\0\1\0\0\0aaaaaaaa\0\xff\xff\x21\2\0\xff\xff\x15" + bytes(10) + b"aaaaaaaaaaaa\0"
        b"mysql_native_password\0",
    ),
}
