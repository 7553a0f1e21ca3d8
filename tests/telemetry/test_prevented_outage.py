"""An outage that monitoring prevents, played for real: the database of an etcd fills up.

etcd refuses every write, and so every grant, once its database exceeds the quota. A real Prometheus scrapes the metrics
of our health probe, with the shipped rules. The warning fires while grants still work. If no operator acts,
EngineDown fires after the first refused grant; if one acts, no grant is ever refused.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError

import pytest

from harness.servers.etcd import Cluster
from harness.servers.process import free_ports
from harness.servers.prometheus import Prometheus
from leasehold import Client, Unavailable
from leasehold.telemetry import EngineHealth, Metrics, fan, metrics_text
from leasehold.telemetry.alerts.prometheus import rules_file
from leasehold.testing import Absent

QUOTA = 64 << 20  # bytes; etcd's default is 2 GiB
SECONDS = 200.0


@contextmanager
def exporter(*sources) -> Iterator[int]:
    """A page with metrics, as a program that uses Leasehold has one."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = metrics_text(*sources).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", free_ports(1)[0]), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Outage:
    """An etcd with a small quota, a client that acquires all the time, a probe, and a Prometheus that scrapes both."""

    def __init__(self, etcd: Cluster, prometheus: Prometheus, client: Client) -> None:
        self.member, self.prometheus, self._client = etcd.members[0], prometheus, client
        self.began = time.monotonic()
        self.log: list[tuple[float, str]] = []  # seconds since the beginning, and what happened
        self.fired: set[str] = set()
        self.refused = False
        self.written = 0

    def note(self, what: str) -> None:
        self.log.append((time.monotonic() - self.began, f"{what} (quota {self.used():.1%} full)"))

    def when(self, what: str) -> float:
        """When something was noted first; never: infinity."""
        return next((at for at, text in self.log if what in text), float("inf"))

    def fill_at_once(self, ratio: float) -> None:
        """Another user of etcd writes, until its database has this share of the quota."""
        while self.used() < ratio:
            self._put("x" * 524_288)
        self.note("etcd was filled")

    def fill_evenly(self, seconds: float) -> None:
        """The other user goes on, at a pace that needs so many seconds to fill etcd. Meanwhile the client acquires
        its lock, and what changes is noted."""
        size = 262_144
        begin, pace = time.monotonic(), seconds / ((1.0 - self.used()) * QUOTA / size)
        for count in itertools.count(1):
            with suppress(HTTPError):  # refused
                self._put("x" * size)
            self.look()
            if self.refused:
                return
            time.sleep(max(0.0, begin + count * pace - time.monotonic()))  # pause: the pace of the writes

    def _put(self, value: str) -> None:
        self.written += 1
        self.member.put(f"reports/{self.written}", value)

    def look(self) -> None:
        """Note what is different from last time."""
        firing = {name for name, state in self.prometheus.alerts().items() if state == "firing"}
        for name in sorted(firing - self.fired):
            self.note(f"{name} fires")
        self.fired |= firing
        if not self.refused and not self.grants():
            self.refused = True
            self.note("the first grant is refused")

    def used(self) -> float:
        return int(self.member.ask("maintenance/status")["dbSize"]) / QUOTA

    def grants(self) -> bool:
        """Whether etcd grants a lock. On a busy machine it may not answer in time: then ask again."""
        while True:
            try:
                with self._client.lock("orders/42", wait=0):
                    return True
            except Unavailable as error:
                if "space" in str(error).lower():  # "database space exceeded", or the alarm NOSPACE
                    return False

    def wait_for(self, alert: str, state: str = "firing") -> None:
        end = time.monotonic() + SECONDS
        while self.prometheus.alerts().get(alert, "inactive") != state:
            assert time.monotonic() < end, f"{alert} is not {state}: {self.prometheus.alerts()}"
            time.sleep(0.2)
        self.note(f"{alert} is {state}")


@pytest.fixture
def outage() -> Iterator[Outage]:
    try:
        etcd = Cluster(1, "--quota-backend-bytes", str(QUOTA)).start()
    except Absent as absent:
        if os.environ.get("CI"):
            pytest.fail(str(absent))
        pytest.skip(str(absent))
    url = f"etcd://{etcd.hosts}"
    metrics, health = Metrics(), EngineHealth(url, interval=1.0)
    prometheus = None
    try:
        with exporter(metrics, health) as port, Client(url, namespace="shop", on_event=fan(metrics)) as client:
            prometheus = Prometheus(
                {"leasehold": [port]}, rules_file().replace("interval: 15s", "interval: 1s")
            ).start()
            yield Outage(etcd, prometheus, client)
    except Absent as absent:
        if os.environ.get("CI"):
            pytest.fail(str(absent))
        pytest.skip(str(absent))
    finally:
        health.close()
        if prometheus is not None:
            prometheus.kill()
        etcd.kill()


@pytest.mark.faults
def test_full_quota_is_warned_of_before_the_first_refused_grant(outage):
    """No operator acts: etcd is filled to 80 %, the rest fills within minutes, and then no lock is granted."""
    outage.fill_at_once(0.8)
    outage.fill_evenly(seconds=110.0)
    outage.wait_for("LeaseholdEngineDown")
    print(*(f"{at:6.1f} s  {what}" for at, what in outage.log), sep="\n")
    refused = outage.when("first grant is refused")
    assert outage.when("LeaseholdStorageFilling fires") < refused, "the warning came too late"
    assert refused < outage.when("LeaseholdEngineDown is firing")


@pytest.mark.faults
def test_operator_who_acts_on_the_warning_prevents_the_outage(outage):
    """The operator does what the runbook says: compact, and defragment. No grant is refused, and the alert resolves."""
    outage.fill_at_once(0.81)
    outage.wait_for("LeaseholdStorageFilling")
    outage.look()
    for number in range(1, outage.written + 1):
        outage.member.delete(f"reports/{number}")
    outage.member.compact()
    outage.member.ask("maintenance/defragment")
    outage.note(f"after compacting and defragmenting, the database uses {outage.used():.0%}")
    outage.wait_for("LeaseholdStorageFilling", "inactive")
    outage.look()
    assert not outage.refused
    print(*(f"{at:6.1f} s  {what}" for at, what in outage.log), sep="\n")
