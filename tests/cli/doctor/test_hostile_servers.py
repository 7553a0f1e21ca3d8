"""`leasehold doctor` at servers that answer nonsense, very slowly, or with too much: findings, and no other error."""

import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from leasehold import Unavailable
from leasehold.cli.doctor.servers import check_servers
from leasehold.engines.probe import Table, filesystem
from tests.support import probe_cli, probe_health
from tests.support.health import probe

DIGITS = b"9" * 400
LONG = b"\x1b]0;title\x07" + b"x" * 5000
FORGED = {
    b"PING": b"+PONG\r\n",
    b"TIME": b"*2\r\n$400\r\n%b\r\n$400\r\n%b\r\n" % (DIGITS, DIGITS),
    b"CONFIG": b"*2\r\n$1\r\nx\r\n$%d\r\n%b\r\n" % (len(LONG), LONG),
}
INFO = b"\r\n".join(
    [b"role:master", b"aof_enabled:1", b"redis_version:" + LONG, b"run_id:" + LONG, b"maxmemory_policy:" + LONG]
    + [name + b":" + DIGITS[:300] for name in (b"used_memory", b"evicted_keys", b"connected_clients", b"keyspace_hits")]
    + [name + b":1" for name in (b"maxmemory", b"maxclients", b"keyspace_misses")]
    + [b"slave0:lag=1e308", b"latest_fork_usec:1e308", b"connected_slaves:1e400"]
)
FORGED[b"INFO"] = b"$%d\r\n%b\r\n" % (len(INFO), INFO)


def answer(connection: socket.socket) -> None:
    with suppress(OSError), connection:
        while data := connection.recv(65_536):
            words = data.upper().split(b"\r\n")
            connection.sendall(b"".join(FORGED.get(word, b"") for word in words))


def test_forged_numbers_and_texts_of_redis_become_findings():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with suppress(OSError):
                answer(listener.accept()[0])

        threading.Thread(target=serve, daemon=True).start()
        health = probe(f"redis://127.0.0.1:{port}")
    findings = list(check_servers(health, "redis"))
    assert health.up
    assert {each.check for each in findings} >= {"reachable", "settings", "storage", "evictions", "connections"}
    for each in findings:
        assert each.found.isprintable()
        assert len(each.found) < 1000


def test_path_that_a_server_names_may_have_any_characters():
    assert filesystem("/tmp\0x") is None
    assert filesystem("/" + "x" * 10_000) is None


@pytest.mark.parametrize(
    ("pattern", "known", "other"),
    [
        (probe_health.etcd_samples, 'etcd_disk_wal_fsync_duration_seconds_bucket{le="0.001"} 5', "metric_{} 1"),
        (probe_health.zookeeper_fields, "zk_quorum_size\t3", "zk_{}\t1"),
    ],
)
def test_only_values_that_are_used_are_kept(pattern, known, other):
    text = "\n".join([*(other.format(number) for number in range(1000)), known, other.format("last")])
    assert [match[0] for match in pattern.finditer(text)] == [known]


def test_forged_statistics_of_tables_are_bounded():
    assert len(list(probe_health.parse_tables(",".join(["lh_grant 1 9"] * 1000)))) == 16
    assert list(probe_health.parse_tables("lh_\x1b[2J 1 1,other 1 1,lh_a -1 5,lh_b 1e9 1,lh_c 1 " + "9" * 400)) == []
    assert list(probe_health.parse_tables("lh_grant 1 9")) == [Table("lh_grant", 1, 9)]


@pytest.mark.parametrize(("name", "found"), [("redis+sentinel", True), ("\x1b[2J", False), ("x" * 41, False)])
def test_forged_name_of_the_engine_behind_a_server_is_ignored(name, found):
    text = f'# TYPE x gauge\nleasehold_server_breaker_state{{engine="{name}"}} 0\n'
    assert bool(probe_health.lock_server_engine.search(text)) is found


class SlowClient:
    """Each call takes four seconds of a clock of its own."""

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0

    def connect(self) -> None:
        self.inspect("")

    def inspect(self, prefix: str) -> list[None]:
        self.calls, self.seconds = self.calls + 1, self.seconds + 4.0
        return []


def test_round_trips_of_a_slow_server_are_measured_for_seconds_only():
    client = SlowClient()
    finding = probe_cli.measure_round_trip(client, SimpleNamespace(now=lambda: client.seconds))
    assert (finding.check, finding.severity) == ("round trip", "warning")
    assert client.calls == 3


def test_break_that_fails_is_a_finding():
    def break_lock(*_: object, **__: object) -> bool:
        raise Unavailable("no answer", engine="redis")

    with pytest.raises(probe_cli.CheckFailed) as failed:
        list(probe_cli.check_break(SimpleNamespace(break_lock=break_lock), SimpleNamespace(token=1)))
    assert failed.value.finding.severity == "danger"
