"""Sessions over TLS with a real server."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness.servers.folders import scratch
from leasehold import Client
from tests.support.certificates import Authority


def test_session_over_tls_serves_many_calls(start_postgresql) -> None:
    """Nothing that TLS itself sends counts as a reply that was not asked for."""
    folder = Path(scratch())
    cert, key = Authority(folder).issue("server", "IP:127.0.0.1")
    cert.chmod(0o644)
    key.chmod(0o600)
    if os.getuid() == 0:
        shutil.chown(key, "postgres")
    server = start_postgresql("ssl=on", f"ssl_cert_file={cert}", f"ssl_key_file={key}")

    def sessions() -> set[int]:
        return {pid for (pid,) in server.ask("select pid from pg_stat_ssl where ssl and pid <> pg_backend_pid()")}

    with Client(f"{server.url()}?sslmode=require") as client:
        leases = [client.lock(f"name-{number}", ttl=60, purpose="p" * 200).acquire() for number in range(200)]
        before = sessions()
        assert len(client.inspect()) == 200, "a reply of many TLS records"
        for lease in leases[:100]:
            lease.renew()
            lease.release()
        assert before
        assert before <= sessions()
        for lease in leases[100:]:
            lease.release()
