"""Header compression and messages, there and back; replies that do not add up."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold import LeaseholdError, Unavailable
from leasehold.engines.etcd import wire
from leasehold.engines.etcd.calls import Calls
from leasehold.engines.etcd.hpack import Decoder, Header, Undecodable, plain
from leasehold.model import Gone, Grant
from leasehold.runtime.base import step
from leasehold.testing.etcd_rig import EtcdRig
from leasehold.testing.suite import made


def test_headers_of_the_standard_are_read() -> None:
    """RFC 7541, C.4: Huffman-coded, each block referring to what the ones before it taught."""
    decoder = Decoder()
    blocks = [
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        "828684be5886a8eb10649cbf",
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
    ]
    found = [decoder.decode(bytes.fromhex(block)) for block in blocks]
    lead = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
    assert found[0] == lead
    assert found[1] == [*lead, (b"cache-control", b"no-cache")]
    assert found[2][1:3] == [(b":scheme", b"https"), (b":path", b"/index.html")]
    assert found[2][4] == (b"custom-key", b"custom-value")


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=300)), max_size=5))
def test_headers_come_back_as_they_were(headers: list[tuple[bytes, bytes]]) -> None:
    assert Decoder().decode(b"".join(plain(*header) for header in headers)) == [Header(*each) for each in headers]


@given(st.binary(max_size=60))
def test_no_bytes_break_the_header_decoder(block: bytes) -> None:
    with suppress(Undecodable):
        Decoder().decode(block)


_numbers = st.integers(0, 2**63 - 1)


_kvs = st.builds(wire.KeyValue, st.binary(), _numbers, _numbers, st.binary(), st.integers(-(2**63), 2**63 - 1))


_headers = st.builds(wire.Header, _numbers, _numbers)


_ranged = st.builds(wire.Ranged, st.none() | _headers, st.lists(_kvs, max_size=3).map(tuple), _numbers)


_ops = st.builds(wire.OpDone, st.none() | _ranged, st.none(), st.none() | st.builds(wire.Deleted, _headers, _numbers))


_txns = st.builds(wire.TxnDone, _headers, st.integers(0, 1), st.lists(_ops, max_size=3).map(tuple))


@given(_txns)
def test_messages_come_back_as_they_were(message: wire.TxnDone) -> None:
    assert wire.decode(wire.TxnDone, wire.encode(message)) == message


@given(st.binary(max_size=80), st.sampled_from([wire.TxnDone, wire.Watched, wire.LeaseLife, wire.Authenticated]))
def test_no_bytes_break_the_message_decoder(data: bytes, kind: type) -> None:
    with suppress(wire.Malformed):
        wire.decode(kind, data)


def test_fields_of_the_future_are_skipped() -> None:
    known = wire.encode(wire.LeaseLife(wire.Header(1, 2), 3, 4))
    unknown = b"\xf8\x06\x01" + b"\xfa\x06\x03abc" + b"\xfd\x06\x00\x00\x00\x00" + b"\xf9\x06" + bytes(8)
    assert wire.decode(wire.LeaseLife, unknown + known + unknown) == wire.LeaseLife(wire.Header(1, 2), 3, 4)


def garbled(data: bytes, dice: random.Random) -> bytes:
    kind = dice.randrange(6)
    if not data or kind == 0:
        return dice.randbytes(dice.randrange(40))
    at = dice.randrange(len(data))
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
    if kind == 3:
        return data[:at] + dice.randbytes(3) + data[at:]
    if kind == 4:
        return data[:at] + data[at + dice.randrange(1, 9) :]
    return data[at:] + data[:at]


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize("kind", [("lock", 1), ("semaphore", 1)])
def test_a_garbled_reply_is_never_a_grant_and_never_a_crash(monkeypatch, bare, queue, kind) -> None:
    rig = made(EtcdRig)
    url = f"etcd://{rig.cluster.hosts}/fuzz-{random.randrange(10**9)}"
    holder, other = bare(url), bare(url)
    shape = {"kind": kind[0], "limit": kind[1]}
    held = holder.claim(**shape)
    grant = step(holder.engine.attempt(held, holder.by()))
    assert isinstance(grant, Grant)
    step(other.engine.ping(other.by()))
    true, dice, strike = Calls._decoded, random.Random(7), [False]

    def decoded(self, method, messages):
        if strike[0] and self is other.engine._calls:
            messages = [garbled(message, dice) for message in messages]
        return true(self, method, messages)

    monkeypatch.setattr(Calls, "_decoded", decoded)
    for _ in range(150):
        claim = other.claim(queue=queue, **shape)
        strike[0] = True
        with suppress(LeaseholdError):
            assert not isinstance(step(other.engine.attempt(claim, other.runtime.now() + 0.5)), Grant)
        mine = other.claim(**shape)._replace(token=5)
        for reply in step(other.engine.renew([mine], other.runtime.now() + 0.5)):
            assert isinstance(reply, Unavailable | Gone), "it has no such grant"
        with suppress(LeaseholdError):
            step(other.engine.inspect("", "", False, other.runtime.now() + 0.5))
        strike[0] = False
        other.engine.forget(claim)
        for owed in list(other.book.owed.values()):
            step(other.engine.release(owed.claim, other.by()))
        other.book.owed.clear()
    left = step(holder.engine.inspect("", "", False, holder.by()))
    assert [holding.token for holding in left] == [grant.token], "nothing of all that was left in line"


def test_a_request_larger_than_any_window_is_sent_in_pieces(bare) -> None:
    rig = made(EtcdRig)
    seat = bare(f"etcd://{rig.cluster.hosts}/long")
    claims = []
    for number in range(90):
        claim = seat.claim(name=f"{number:03}" + "é" * 126, namespace="ü" * 127)
        claims.append(claim._replace(token=step(seat.engine.attempt(claim, seat.by())).token))
    replies = step(seat.engine.renew(claims, seat.by()))
    assert {type(reply).__name__ for reply in replies} == {"Alive"}
    assert len(step(seat.engine.inspect("ü" * 127, "", False, seat.by()))) == 90
    for claim in claims:
        assert seat.release(claim)
