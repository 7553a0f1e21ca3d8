"""The simulated network and server: which messages they lose, duplicate and delay, and what a restart keeps."""

import pytest

from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.engines.registry import ClaimRegistry
from leasehold.errors import Mismatch, Unavailable
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.simulated import Process, Simulator
from leasehold.testing.network import NetworkProfile, NetworkTransport, Observer, SimulatedServer
from tests.support import probe_memory


class RecordingObserver(Observer):
    def __init__(self):
        self.seen = []

    def sent(self, transport, verb, args):
        self.seen.append(f"sent {verb}")

    def answered(self, verb, args, answer):
        self.seen.append(f"answered {verb}")

    def delivered(self, transport, verb, args, answer):
        self.seen.append(f"delivered {verb}")

    def notified(self, transport, notification):
        self.seen.append(f"heard {notification.kind}")


class Site:
    """One server and as many clients as needed."""

    def __init__(self, profile):
        self.simulator = Simulator(1)
        self.server = SimulatedServer(self.simulator, profile)
        self.server.observer = self.observer = RecordingObserver()

    def client(self, name):
        process = Process(self.simulator, name)
        registry = ClaimRegistry(process, name)
        config = EngineConfig.parse("own://", 5.0)
        return process, registry, self.server.opener()(config, process, registry)

    def run(self, process, coro, seconds=30.0):
        return self.simulator.run_until_complete(process.spawn(coro, "call"), seconds)

    def attempt(self, client, number, **options):
        process, _, engine = client
        return self.run(process, engine.attempt(claim(number, **options), process.now() + 2.0))


def claim(number, **options):
    return Claim("", "name", str(number), hash_id(str(number)), Holder("somebody"), 10.0)._replace(**options)


@pytest.fixture
def reliable_site():
    return Site(NetworkProfile())


def test_call_is_sent_answered_and_delivered(reliable_site):
    client = reliable_site.client("a")
    assert isinstance(reliable_site.attempt(client, 1), Grant)
    assert isinstance(reliable_site.attempt(client, 2), Busy)
    assert reliable_site.observer.seen[:3] == ["sent attempt", "answered attempt", "delivered attempt"]


def test_server_error_reaches_the_client_unchanged(reliable_site):
    client = reliable_site.client("a")
    reliable_site.attempt(client, 1)
    with pytest.raises(Mismatch):
        reliable_site.attempt(client, 2, kind="semaphore", limit=2)


def test_lost_message_raises_unavailable_at_deadline():
    site = Site(NetworkProfile(loss=1.0))
    client = site.client("a")
    began = site.simulator.time
    with pytest.raises(Unavailable):
        site.attempt(client, 1)
    assert site.simulator.time - began == pytest.approx(2.0, abs=0.05)
    assert not site.server.memory.lock_states


def test_call_with_past_deadline_sends_nothing(reliable_site):
    process, _, engine = reliable_site.client("a")
    with pytest.raises(Unavailable):
        reliable_site.run(process, engine.attempt(claim(1), process.now()))
    assert reliable_site.observer.seen == []


def test_duplicated_request_is_executed_twice_and_delivered_once():
    site = Site(NetworkProfile(duplication=1.0))
    site.attempt(site.client("a"), 1)
    site.simulator.run(1)
    assert site.observer.seen.count("answered attempt") == 2
    assert site.observer.seen.count("delivered attempt") == 1


def test_late_message_is_still_executed():
    site = Site(NetworkProfile(late=1.0, late_by=30.0))
    with pytest.raises(Unavailable):
        site.attempt(site.client("a"), 1)
    site.simulator.run(60)
    assert "answered attempt" in site.observer.seen
    assert "delivered attempt" not in site.observer.seen


@pytest.mark.parametrize("ordered", [True, False])
def test_connection_keeps_order_only_if_profile_is_ordered(ordered):
    site = Site(NetworkProfile(latency=0.1, ordered=ordered))
    process, _, engine = site.client("a")
    site.attempt((process, None, engine), 1)
    for number in range(100, 120):
        engine.forget(claim(number))
        probe_memory.transport(engine).post("attempt", (claim(number), "a"))
    site.simulator.run(10)
    executed = [seen for seen in site.observer.seen if seen.startswith("answered")][-40:]
    assert (executed == ["answered release", "answered attempt"] * 20) is ordered


def test_notification_is_delivered_unless_profile_loses_it(reliable_site):
    first, second = reliable_site.client("a"), reliable_site.client("b")
    reliable_site.attempt(first, 1)
    reliable_site.attempt(second, 2, queue=True)
    reliable_site.run(first[0], first[2].release(claim(1), first[0].now() + 2))
    reliable_site.simulator.run(0.1)
    assert second[1].waiting[claim(2).id_hash].woken
    reliable_site.server.profile = NetworkProfile(notification_loss=1.0)
    reliable_site.attempt(second, 2, queue=True)
    reliable_site.attempt(first, 3, queue=True)
    reliable_site.run(second[0], second[2].release(claim(2), second[0].now() + 2))
    reliable_site.simulator.run(0.1)
    assert not first[1].waiting[claim(3).id_hash].woken


def test_client_cut_off_gets_no_answer_and_looks_reachable(reliable_site):
    client = reliable_site.client("a")
    reliable_site.attempt(client, 1)
    reliable_site.server.cut(client[0])
    with pytest.raises(Unavailable):
        reliable_site.attempt(client, 2)
    assert "a" in reliable_site.server.memory.notify_callbacks
    reliable_site.server.restore(client[0])
    assert isinstance(reliable_site.attempt(client, 2), Busy)


def test_crash_closes_connection_and_drops_later_messages(reliable_site):
    process, _, engine = reliable_site.client("a")
    reliable_site.attempt((process, None, engine), 1)
    process.crash()
    engine.forget(claim(1))
    reliable_site.simulator.run(1)
    assert "a" not in reliable_site.server.memory.notify_callbacks
    assert "answered release" not in reliable_site.observer.seen


def test_crash_during_cut_is_noticed_when_connection_is_restored(reliable_site):
    process, _, engine = reliable_site.client("a")
    reliable_site.attempt((process, None, engine), 1)
    reliable_site.server.cut(process)
    process.crash()
    reliable_site.simulator.run(1)
    assert "a" in reliable_site.server.memory.notify_callbacks
    reliable_site.server.restore(process)
    reliable_site.simulator.run(1)
    assert "a" not in reliable_site.server.memory.notify_callbacks


def test_server_restart_keeps_data_and_drops_connections(reliable_site):
    holder, waiter = reliable_site.client("a"), reliable_site.client("b")
    granted = reliable_site.attempt(holder, 1)
    reliable_site.attempt(waiter, 2, queue=True)
    engine, registry = waiter[2], waiter[1]
    pending = waiter[0].spawn(engine.attempt(claim(3), waiter[0].now() + 2.0), "pending")
    pending.watched = True
    reliable_site.simulator.run(0.0002)
    reliable_site.server.stop()
    assert reliable_site.server.memory.notify_callbacks == {}
    reliable_site.simulator.run(0.1)
    with pytest.raises(Unavailable, match="lost"):
        pending.result()
    with pytest.raises(Unavailable):
        reliable_site.attempt(holder, 1)
    reliable_site.server.start()
    reliable_site.simulator.run(1.0)
    assert "b" in reliable_site.server.memory.notify_callbacks  # the client registered again on its own
    assert (
        registry.waiting[claim(2).id_hash].recheck_at is not None
    )  # and re-checks, because it may have missed a wake-up
    assert reliable_site.attempt(holder, 1).token == granted.token


def test_restart_during_cut_is_noticed_when_connection_is_restored(reliable_site):
    client = reliable_site.client("a")
    reliable_site.attempt(client, 1, queue=True)
    reliable_site.server.cut(client[0])
    reliable_site.server.stop()
    reliable_site.server.start()
    reliable_site.server.restore(client[0])
    reliable_site.simulator.run(1.0)
    assert isinstance(reliable_site.attempt(client, 1), Grant)
    assert "a" in reliable_site.server.memory.notify_callbacks


def test_paused_server_answers_after_resume(reliable_site):
    client = reliable_site.client("a")
    reliable_site.server.process.pause()
    reliable_site.simulator.schedule(1.0, reliable_site.server.process.resume)
    assert isinstance(reliable_site.attempt(client, 1), Grant)
    assert reliable_site.simulator.time > 1.0


def test_closed_transport_gets_no_notifications(reliable_site):
    process, registry, engine = reliable_site.client("a")
    reliable_site.attempt((process, registry, engine), 1)
    reliable_site.run(process, engine.close())
    reliable_site.simulator.run(0.1)
    assert reliable_site.server.memory.notify_callbacks == {}
    other = NetworkTransport(process, reliable_site.server, registry)
    other.close("a")  # as by the watchdog's engine instance, which never listened
    assert other.closed is False
