"""Three servers of one engine: each shows the history of all, and says which peer is missing."""

import asyncio
import contextlib
import socket
import time
from datetime import UTC, datetime

import pytest

from leasehold.errors import ConfigError
from leasehold.events import Event
from leasehold.server import keys, schemas
from leasehold.server.history import History
from leasehold.server.keys import Right
from leasehold.server.messages import encode
from leasehold.server.past import Owner
from leasehold.server.peers import PAUSE, PEER_SECONDS, Peer, Peers
from leasehold.server.picture import Picture, Snapshot
from tests.support.running_server import poll, running


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


@contextlib.contextmanager
def three_servers(tmp_path, *arguments, query=""):
    """All with the same list of peers, which has themselves in it."""
    ports = free_ports(3)
    peers = [argument for port in ports for argument in ("--peers", f"http://127.0.0.1:{port}{query}")]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                running(*peers, "--listen", f"127.0.0.1:{port}", *arguments, url=f"sqlite://{tmp_path}/locks.db")
            )
            for port in ports
        ]


def history(server, name, **named):
    answer = server.get(f"/v1/history?name={name}", **named)
    assert answer.status == 200, answer
    return answer.json


@pytest.mark.extended
def test_three_servers_show_one_history(tmp_path, new_id):
    with three_servers(tmp_path) as servers:
        first, second, third = servers
        claim = {"name": "orders/42", "id": new_id()}
        token = first.post("/v1/acquire", {**claim, "ttl": 60}).json["token"]
        second.post("/v1/renew", {**claim, "token": token, "ttl": 60})
        third.post("/v1/release", claim)
        later = second.post("/v1/acquire", {"name": "orders/42", "id": new_id(), "holder": "batch"}).json["token"]
        third.post("/v1/break", {"name": "orders/42", "token": later, "reason": "it hangs"})
        poll(lambda: not history(first, "orders/42")["missing"])  # asked before all had started
        for server in servers:
            found = poll(lambda server=server: len((seen := history(server, "orders/42"))["grants"]) == 2 and seen)
            newer, older = found["grants"]
            assert (older["token"], older["renewed"], older["end"]) == (token, 1, "released")
            assert (newer["token"], newer["holder"], newer["end"], newer["reason"]) == (
                later,
                "batch",
                "broken",
                "it hangs",
            )
            assert found["missing"] == []
            (incident,) = poll(lambda server=server: server.get("/v1/incidents").json["incidents"])
            assert (incident["kind"], incident["token"]) == ("broken", later)

            def counted(server=server):
                return server.get("/v1/stats").json["stats"]["total"]["counts"]["acquires"] == {"granted direct": 2}

            poll(counted)
        assert third.stop() == 0
        gone = f"127.0.0.1:{third.port}"
        found = poll(lambda: (seen := history(first, "orders/42"))["missing"] and seen)
        assert found["missing"] == [gone]
        assert [grant["token"] for grant in found["grants"]] == [later, token], "what the others saw is shown"
        assert poll(lambda: second.get("/v1/stats").json["missing"]) == [gone]
        poll(lambda: f"the peer {gone} did not answer" in first.output)


@pytest.mark.extended
def test_peers_authenticate_and_callers_see_only_their_names(tmp_path, new_id):
    path, secret = tmp_path / "keys.toml", tmp_path / "peer.key"
    now = datetime.now(UTC)
    shop = keys.create(path, "shop", [Right.parse("lock,read:shop:orders/")], now=now)
    other = keys.create(path, "other", [Right.parse("lock,read:other:")], now=now)
    secret.write_text(keys.create(path, "peer", [Right.parse("read:*:")], now=now))
    secret.chmod(0o600)
    with three_servers(tmp_path, "--keys", str(path), query=f"?api_key_file={secret}") as (first, second, _):
        claim = {"namespace": "shop", "name": "orders/42", "id": new_id()}
        assert first.post("/v1/acquire", claim, key=shop).status == 200
        place = "/v1/history?namespace=shop&name=orders/42"
        (seen,) = poll(lambda: second.get(place, key=shop).json["grants"])
        assert seen["server"] == "peer 1", "a key for some names does not see where servers are"
        (seen,) = second.get(place, key=secret.read_text()).json["grants"]
        assert seen["server"] == f"127.0.0.1:{first.port}"
        assert second.get(place, key=other).status == 403
        assert second.get("/v1/incidents", key=other).json["incidents"] == []
        assert secret.read_text().strip() not in first.output + second.output


def test_peer_that_hangs_is_not_asked_by_each_reader(tmp_path):
    """A peer that takes the connection and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        silent.setblocking(False)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with running("--peers", f"http://{address}", url=f"sqlite://{tmp_path}/locks.db") as server:
            server.post("/v1/acquire", {"name": "orders/42"})
            began = time.monotonic()
            for _ in range(20):
                found = history(server, "orders/42")
                assert found["missing"] == [address]
                assert len(found["grants"]) == 1
            seconds = time.monotonic() - began
        asked = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                asked += 1
        assert 1 <= asked <= 1 + seconds / (PEER_SECONDS + PAUSE)


HISTORY = History(time.time)
HISTORY(Event("granted", "memory", "", "orders/42", 1e9, token=1, fingerprint="f", ttl=60.0, seconds=0.0))
HISTORY(Event("lost", "memory", "", "orders/42", 1e9, token=1, fingerprint="f", reason="expired"))
PICTURE = Picture(Snapshot("", 1e9, ()), 0.0, False)
OWNER = Owner(
    holder="web", host=None, pid=None, holds=[], waits=[], heard_at=1.0, quiet=False, expires_at=1.0, blocks=0, lost=0
)
# What to ask for -> the answer of a peer.
ANSWERS = {
    "past": schemas.NameHistory(
        namespace="", name="orders/42", grants=HISTORY.grants("", "orders/42"), waits=[], server="other"
    ),
    "incidents": schemas.Incidents(incidents=HISTORY.incidents(), server="other"),
    "stats": schemas.StatsAnswer(stats=HISTORY.stats("", 60), server="other"),
    "owners": schemas.Owners(owners=[OWNER], as_of=1.0, stale=False, server="other"),
}
ASK = {
    "past": lambda peers: peers.past("", "orders/42"),
    "incidents": lambda peers: peers.incidents(""),
    "stats": lambda peers: peers.stats("", 60),
    "owners": lambda peers: peers.owners(PICTURE),
}


async def ask_one(what, body):
    """What a server merges if its only peer answers with this body, and which peers are missing."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        peers = Peers(History(time.time), Peer.parse(f"http://127.0.0.1:{port}"), "this")
        merged = await ASK[what](peers)
        return merged.value, [f"127.0.0.1:{port}"] == merged.missing


@pytest.mark.parametrize("what", ANSWERS)
def test_answer_of_a_peer_is_merged(what):
    _, is_missing = asyncio.run(ask_one(what, encode(ANSWERS[what])))
    assert not is_missing


@pytest.mark.parametrize(
    ("what", "body"),
    [
        *((what, body) for what in ANSWERS for body in (b'{"server":"\xff"}', b"<html>", b"null", b"[" * 100_000, b"")),
        *(
            (what, encode(ANSWERS[what]).replace(b"1000000000.0", instant))
            for what in ("past", "incidents")
            for instant in (b"1e18", b"-1e18", b"1e300")
        ),
        ("past", encode(ANSWERS["past"]).replace(b'"token":1', b'"token":1' + b"0" * 400)),
        ("owners", encode(ANSWERS["owners"]).replace(b'"lost":0', b'"lost":-1')),
        ("stats", encode(ANSWERS["stats"]).replace(b'"bounds":[', b'"bounds":[0.0,', 1)),
        ("stats", encode(ANSWERS["stats"]).replace(b'"counts":{', b'"counts":{"direct":[1,2],', 1)),
        ("stats", encode(ANSWERS["stats"]).replace(b'"counts":{', b'"counts":{"broken":-1,', 1)),
    ],
)
def test_peer_with_a_broken_answer_is_missing_and_breaks_no_page(what, body):
    """A peer of another version, with a clock far off, or another program at its address."""
    assert body != encode(ANSWERS[what])
    _, is_missing = asyncio.run(ask_one(what, body))
    assert is_missing


@pytest.mark.parametrize(
    "url", ["redis://h", "http://h?api_key_file=/nowhere/key", "https://h?ca=/nowhere/ca.pem", "x"]
)
def test_peer_that_cannot_be_one_is_refused_at_the_start(url):
    with pytest.raises(ConfigError):
        Peer.parse(url)
