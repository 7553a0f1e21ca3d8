"""The simulated network and server: what they lose, repeat and keep."""

import pytest

from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.names import mark
from leasehold.errors import Mismatch, Unavailable
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.simulated import Process, World
from leasehold.testing.network import NetworkLink, Observer, Server, Weather


class Everything(Observer):
    def __init__(self):
        self.seen = []

    def sent(self, link, verb, args):
        self.seen.append(f"sent {verb}")

    def answered(self, verb, args, answer):
        self.seen.append(f"answered {verb}")

    def delivered(self, link, verb, args, answer):
        self.seen.append(f"delivered {verb}")

    def heard(self, link, word):
        self.seen.append(f"heard {word.kind}")


class Site:
    """One server and as many clients as needed."""

    def __init__(self, weather):
        self.world = World(1)
        self.server = Server(self.world, weather)
        self.server.observer = self.observer = Everything()

    def client(self, name):
        process = Process(self.world, name)
        book = Book(process, name)
        config = EngineConfig.parse("own://", 5.0)
        return process, book, self.server.opener()(config, process, book)

    def run(self, process, coro, seconds=30.0):
        return self.world.finish(process.spawn(coro, "call"), seconds)

    def attempt(self, client, number, **options):
        process, _, engine = client
        return self.run(process, engine.attempt(claim(number, **options), process.now() + 2.0))


def claim(number, **options):
    return Claim("", "name", str(number), mark(str(number)), Holder("somebody"), 10.0)._replace(**options)


@pytest.fixture
def calm():
    return Site(Weather())


def test_a_call_is_answered(calm):
    client = calm.client("a")
    assert isinstance(calm.attempt(client, 1), Grant)
    assert isinstance(calm.attempt(client, 2), Busy)
    assert calm.observer.seen[:3] == ["sent attempt", "answered attempt", "delivered attempt"]


def test_a_refusal_travels_as_itself(calm):
    client = calm.client("a")
    calm.attempt(client, 1)
    with pytest.raises(Mismatch):
        calm.attempt(client, 2, kind="semaphore", limit=2)


def test_what_is_lost_is_unavailable_at_the_deadline():
    site = Site(Weather(loss=1.0))
    client = site.client("a")
    began = site.world.time
    with pytest.raises(Unavailable):
        site.attempt(client, 1)
    assert site.world.time - began == pytest.approx(2.0, abs=0.05)
    assert not site.server.store.lines


def test_a_deadline_that_has_passed_sends_nothing(calm):
    process, _, engine = calm.client("a")
    with pytest.raises(Unavailable):
        calm.run(process, engine.attempt(claim(1), process.now()))
    assert calm.observer.seen == []


def test_a_double_is_carried_out_twice_and_answered_once():
    site = Site(Weather(duplication=1.0))
    site.attempt(site.client("a"), 1)
    site.world.run(1)
    assert site.observer.seen.count("answered attempt") == 2
    assert site.observer.seen.count("delivered attempt") == 1


def test_a_late_message_still_comes():
    site = Site(Weather(late=1.0, late_by=30.0))
    with pytest.raises(Unavailable):
        site.attempt(site.client("a"), 1)
    site.world.run(60)
    assert "answered attempt" in site.observer.seen
    assert "delivered attempt" not in site.observer.seen


@pytest.mark.parametrize("ordered", [True, False])
def test_a_connection_keeps_its_order_unless_told_otherwise(ordered):
    site = Site(Weather(latency=0.1, ordered=ordered))
    process, _, engine = site.client("a")
    site.attempt((process, None, engine), 1)
    for number in range(100, 120):
        engine.forget(claim(number))
        engine._link.post("attempt", (claim(number), "a"))
    site.world.run(10)
    carried_out = [seen for seen in site.observer.seen if seen.startswith("answered")][-40:]
    assert (carried_out == ["answered release", "answered attempt"] * 20) is ordered


def test_a_wake_up_is_heard_and_a_deaf_client_hears_none(calm):
    first, second = calm.client("a"), calm.client("b")
    calm.attempt(first, 1)
    calm.attempt(second, 2, queue=True)
    calm.run(first[0], first[2].release(claim(1), first[0].now() + 2))
    calm.world.run(0.1)
    assert second[1].waiting[claim(2).mark].go
    calm.server.weather = Weather(deaf=1.0)
    calm.attempt(second, 2, queue=True)
    calm.attempt(first, 3, queue=True)
    calm.run(second[0], second[2].release(claim(2), second[0].now() + 2))
    calm.world.run(0.1)
    assert not first[1].waiting[claim(3).mark].go


def test_one_who_is_cut_off_hears_nothing_and_looks_reachable(calm):
    client = calm.client("a")
    calm.attempt(client, 1)
    calm.server.cut(client[0])
    with pytest.raises(Unavailable):
        calm.attempt(client, 2)
    assert "a" in calm.server.store.mailboxes
    calm.server.heal(client[0])
    assert isinstance(calm.attempt(client, 2), Busy)


def test_a_crash_closes_the_socket_and_drops_what_is_sent_after(calm):
    process, _, engine = calm.client("a")
    calm.attempt((process, None, engine), 1)
    process.crash()
    engine.forget(claim(1))
    calm.world.run(1)
    assert "a" not in calm.server.store.mailboxes
    assert "answered release" not in calm.observer.seen


def test_a_crash_behind_a_cut_shows_when_the_cut_heals(calm):
    process, _, engine = calm.client("a")
    calm.attempt((process, None, engine), 1)
    calm.server.cut(process)
    process.crash()
    calm.world.run(1)
    assert "a" in calm.server.store.mailboxes
    calm.server.heal(process)
    calm.world.run(1)
    assert "a" not in calm.server.store.mailboxes


def test_a_restart_keeps_the_data_and_loses_everything_else(calm):
    holder, waiter = calm.client("a"), calm.client("b")
    granted = calm.attempt(holder, 1)
    calm.attempt(waiter, 2, queue=True)
    engine, book = waiter[2], waiter[1]
    pending = waiter[0].spawn(engine.attempt(claim(3), waiter[0].now() + 2.0), "pending")
    pending.watched = True
    calm.world.run(0.0002)
    calm.server.stop()
    assert calm.server.store.mailboxes == {}
    calm.world.run(0.1)
    with pytest.raises(Unavailable, match="lost"):
        pending.result()
    with pytest.raises(Unavailable):
        calm.attempt(holder, 1)
    calm.server.start()
    calm.world.run(1.0)
    assert "b" in calm.server.store.mailboxes  # registered again, unasked
    assert book.waiting[claim(2).mark].look_at is not None  # and looks again, as it cannot know what it missed
    assert calm.attempt(holder, 1).token == granted.token


def test_a_restart_behind_a_cut_shows_when_the_cut_heals(calm):
    client = calm.client("a")
    calm.attempt(client, 1, queue=True)
    calm.server.cut(client[0])
    calm.server.stop()
    calm.server.start()
    calm.server.heal(client[0])
    calm.world.run(1.0)
    assert isinstance(calm.attempt(client, 1), Grant)
    assert "a" in calm.server.store.mailboxes


def test_a_paused_server_answers_when_it_goes_on(calm):
    client = calm.client("a")
    calm.server.process.pause()
    calm.world.after(1.0, calm.server.process.resume)
    assert isinstance(calm.attempt(client, 1), Grant)
    assert calm.world.time > 1.0


def test_a_closed_link_is_told_nothing_more(calm):
    process, book, engine = calm.client("a")
    calm.attempt((process, book, engine), 1)
    calm.run(process, engine.close())
    calm.world.run(0.1)
    assert calm.server.store.mailboxes == {}
    other = NetworkLink(process, calm.server, book)
    other.close("a")  # the watchdog's twin, which never listened
    assert other.closed is False
