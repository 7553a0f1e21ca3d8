"""What a real server shows of its locks and of their past, on every engine."""

import ssl
import threading

import pytest

import leasehold
from leasehold.events import Event
from leasehold.model import Holder, Holding
from leasehold.server import feed, schemas
from leasehold.server.problems import TooMany
from tests.support import probe_server
from tests.support.certificates import Authority
from tests.support.running_server import poll, running


def history(server, name):
    return server.get(f"/v1/history?name={name}").json["grants"]


def incidents(server, name):
    return server.get(f"/v1/incidents?namespace=&prefix={name}").json["incidents"]


def test_lease_that_expires_is_shown_as_lost_with_the_next_token(server, name, new_id):
    first, second = {"name": name, "id": new_id()}, {"name": name, "id": new_id()}
    token = server.post("/v1/acquire", {**first, "ttl": 1, "holder": "paused"}).json["token"]
    later = server.post("/v1/acquire", {**second, "ttl": 60, "wait": 60, "holder": "next"}).json["token"]
    assert server.post("/v1/renew", {**first, "token": token}).status == 410
    newer, older = history(server, name)
    assert (newer["token"], newer["holder"], newer["end"], newer["queued"]) == (later, "next", None, True)
    assert (older["token"], older["end"]) == (token, "lost")
    # The server counts the ttl from its answer, which comes a little after the engine has granted it.
    assert older["ended_at"] < newer["granted_at"] + 10
    (incident,) = incidents(server, name)
    assert (incident["kind"], incident["token"], incident["token_after"]) == ("lost", token, later)
    assert incident["silent"] > 0  # less than the ttl by as much as that answer came later
    (wait,) = server.get(f"/v1/history?name={name}").json["waits"]
    assert (wait["holder"], wait["outcome"]) == ("next", "granted")


def test_release_after_the_ttl_is_shown_as_lost(server, name, new_id):
    claim = {"name": name, "id": new_id()}
    token = server.post("/v1/acquire", {**claim, "ttl": 0.5}).json["token"]
    poll(lambda: not server.get(f"/v1/locks?name={name}").json["holdings"])

    def ended():
        # The server counts the ttl from its answer, so on a slow machine the engine ends the grant well before that.
        assert server.post("/v1/release", claim).json == {"released": False}
        return [each for each in history(server, name) if each["end"]]

    (grant,) = poll(ended)
    assert (grant["token"], grant["end"], grant["reason"]) == (token, "lost", "expired")
    assert [each["kind"] for each in incidents(server, name)] == ["lost"]


def test_client_that_holds_and_waits_is_an_owner(server, name):
    url = f"http://127.0.0.1:{server.port}"
    with leasehold.Client(url, holder="indexer-1") as client, leasehold.Client(url, holder="packer-6") as other:
        with client.lock(name):
            waiting = threading.Thread(target=lambda: other.lock(name).acquire(wait=60).release())
            waiting.start()

            def owners():
                found = server.get(f"/v1/owners?prefix={name}").json["owners"]
                return {owner["holder"]: owner for owner in found} if len(found) == 2 else None

            found = poll(owners)
            assert found["indexer-1"]["holds"] == found["packer-6"]["waits"] == [name]
            assert (found["indexer-1"]["blocks"], found["indexer-1"]["quiet"]) == (1, False)
        waiting.join()


def test_deadlock_is_shown_with_the_grant_to_break(server, name):
    """Two threads of two clients; the reader looks at incidents only."""
    url, first, second = f"http://127.0.0.1:{server.port}", f"{name}/a", f"{name}/b"
    both = threading.Barrier(2)
    ended = []

    def work(mine, theirs):
        with leasehold.Client(url) as client:
            try:
                with client.lock(mine):
                    both.wait(60)
                    with client.lock(theirs, wait=60):
                        ended.append("done")
            except leasehold.LeaseLost:
                ended.append("lost")

    threads = [threading.Thread(target=work, args=order) for order in ((first, second), (second, first))]
    for thread in threads:
        thread.start()
    (incident,) = poll(lambda: incidents(server, name))
    assert incident["kind"] == "deadlock"
    assert incident["names"] == [first, second]
    assert "wait for each other" in incident["meaning"]
    breaking = {"name": incident["name"], "token": incident["token"], "reason": "deadlock"}
    assert server.post("/v1/break", breaking).json == {"broken": True}
    for thread in threads:
        thread.join()
    assert "done" in ended
    poll(lambda: [each for each in incidents(server, name) if each["kind"] == "deadlock" and each["ended_at"]])


@pytest.mark.extended
def test_peers_are_asked_over_tls(tmp_path, new_id):
    authority = Authority(tmp_path)
    cert, key = authority.issue("server", "IP:127.0.0.1")
    url = f"sqlite://{tmp_path}/locks.db"
    with running("--tls-cert", str(cert), "--tls-key", str(key), url=url) as peer:
        secure = ssl.create_default_context(cafile=authority.cert)
        peer.post("/v1/acquire", {"name": "orders/42", "id": new_id()}, tls=secure)
        peers = f"https://127.0.0.1:{peer.port}?ca={authority.cert}"
        with running("--peers", peers, url=url) as server:
            assert len(poll(lambda: history(server, "orders/42"))) == 1
        with running("--peers", f"https://127.0.0.1:{peer.port}", url=url) as wary:
            answer = wary.get("/v1/history?name=orders/42").json
            assert (answer["grants"], answer["missing"]) == ([], [f"127.0.0.1:{peer.port}"]), (
                "not an authority it knows"
            )


def test_page_of_a_semaphore_with_a_long_queue_is_bounded(monkeypatch):
    """Each holding is shown with the whole queue of its name, so the answer could have the product of both."""
    monkeypatch.setattr(schemas, "MAX_WAITERS", 100)
    held = Holding("", "sem", "held", "exclusive", "semaphore", 50, "", Holder("a"), 0.0, 9.0)
    found = [held._replace(token=n) for n in range(1, 51)] + [
        held._replace(state="waiting", position=n) for n in range(40)
    ]
    tokens, cursor, pages = [], None, 0
    while pages == 0 or cursor is not None:
        page = probe_server.make_locks_page(found, 1000, probe_server.read_cursor(cursor), 0.0, False)
        tokens += [each.token for each in page.holdings]
        assert 0 < sum(len(each.queue) for each in page.holdings) <= 100
        cursor, pages = page.cursor, pages + 1
    assert (tokens, pages) == ([*range(1, 51)], 25)


def test_reservations_of_one_semaphore_are_on_one_page_each():
    """They have no token, so a cursor of name and token left out those behind the end of a page."""
    reserved = Holding("", "sem", "reserved", "exclusive", "semaphore", 50, "", Holder("a"), 0.0, 3.0)
    found = [reserved._replace(fingerprint=f"{n:016x}") for n in range(7)]
    seen, cursor = [], None
    for _ in range(4):
        page = probe_server.make_locks_page(found, 2, probe_server.read_cursor(cursor), 0.0, False)
        seen += [each.fingerprint for each in page.holdings]
        cursor = page.cursor
    assert (seen, cursor) == ([each.fingerprint for each in found], None)


def test_event_streams_of_one_caller_are_bounded_and_share_their_bytes(monkeypatch):
    """Each event costs something for each stream, which is time that the renewals of others do not get."""
    monkeypatch.setattr(feed, "MAX_WATCHERS", 2)
    events = feed.Feed()
    mine = [events.watch("", "a", "web") for _ in range(2)]
    with pytest.raises(TooMany):
        events.watch("", "b", "web")
    other = events.watch("", "", "cron")
    for kind in ("renewed", "granted"):
        events(Event(kind, "memory", "", "a", 0.0))
    (sent,) = probe_server.unsent(other)
    assert sent.startswith(b"event: granted\n")
    assert all(probe_server.unsent(stream)[0] is sent for stream in mine)
    events.forget(mine[0])
    events.watch("", "b", "web")
