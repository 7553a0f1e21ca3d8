"""Round trips of header compression and messages; garbled replies."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rigs.etcd import EtcdRig
from leasehold import LeaseholdError, Unavailable
from leasehold.engines.etcd import messages
from leasehold.engines.etcd.grpc.hpack import Header, HeaderDecoder, ProtocolError, encode_literal
from leasehold.engines.etcd.rpc import RpcClient
from leasehold.model import Gone, Grant
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.suite import rig_or_skip


def test_header_decoder_reads_the_rfc_7541_examples() -> None:
    """RFC 7541, C.4: Huffman-coded blocks that refer to headers of earlier blocks."""
    decoder = HeaderDecoder()
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
def test_headers_survive_a_round_trip(headers: list[tuple[bytes, bytes]]) -> None:
    assert HeaderDecoder().decode(b"".join(encode_literal(*header) for header in headers)) == [
        Header(*each) for each in headers
    ]


@given(st.binary(max_size=60))
def test_header_decoder_survives_any_bytes(block: bytes) -> None:
    with suppress(ProtocolError):
        HeaderDecoder().decode(block)


_numbers = st.integers(0, 2**63 - 1)


_kvs = st.builds(messages.KeyValue, st.binary(), _numbers, _numbers, st.binary(), st.integers(-(2**63), 2**63 - 1))


_headers = st.builds(messages.ResponseHeader, _numbers, _numbers)


_ranged = st.builds(messages.RangeResponse, st.none() | _headers, st.lists(_kvs, max_size=3).map(tuple), _numbers)


_ops = st.builds(
    messages.ResponseOp,
    st.none() | _ranged,
    st.none(),
    st.none() | st.builds(messages.DeleteRangeResponse, _headers, _numbers),
)


_txns = st.builds(messages.TxnResponse, _headers, st.integers(0, 1), st.lists(_ops, max_size=3).map(tuple))


@given(_txns)
def test_messages_survive_a_round_trip(message: messages.TxnResponse) -> None:
    assert messages.decode(messages.TxnResponse, messages.encode(message)) == message


@given(
    st.binary(max_size=80),
    st.sampled_from(
        [messages.TxnResponse, messages.WatchResponse, messages.LeaseTtlResponse, messages.AuthenticateResponse]
    ),
)
def test_message_decoder_survives_any_bytes(data: bytes, kind: type) -> None:
    with suppress(messages.MalformedReply):
        messages.decode(kind, data)


def test_unknown_message_fields_are_skipped() -> None:
    known = messages.encode(messages.LeaseTtlResponse(messages.ResponseHeader(1, 2), 3, 4))
    unknown = b"\xf8\x06\x01" + b"\xfa\x06\x03abc" + b"\xfd\x06\x00\x00\x00\x00" + b"\xf9\x06" + bytes(8)
    assert messages.decode(messages.LeaseTtlResponse, unknown + known + unknown) == messages.LeaseTtlResponse(
        messages.ResponseHeader(1, 2), 3, 4
    )


def garble(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(6)
    if not data or kind == 0:
        return rng.randbytes(rng.randrange(40))
    offset = rng.randrange(len(data))
    if kind == 1:
        return data[:offset]
    if kind == 2:
        return data[:offset] + bytes([data[offset] ^ 1 << rng.randrange(8)]) + data[offset + 1 :]
    if kind == 3:
        return data[:offset] + rng.randbytes(3) + data[offset:]
    if kind == 4:
        return data[:offset] + data[offset + rng.randrange(1, 9) :]
    return data[offset:] + data[:offset]


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize("kind", [("lock", 1), ("semaphore", 1)])
def test_garbled_reply_is_never_a_grant_and_never_a_crash(monkeypatch, make_driver, queue, kind) -> None:
    rig = rig_or_skip(EtcdRig)
    url = f"etcd://{rig.cluster.hosts}/fuzz-{random.randrange(10**9)}"
    holder, other = make_driver(url), make_driver(url)
    shape = {"kind": kind[0], "limit": kind[1]}
    held = holder.claim(**shape)
    grant = run_sync(holder.engine.attempt(held, holder.deadline()))
    assert isinstance(grant, Grant)
    run_sync(other.engine.ping(other.deadline()))
    original, rng, garbling = RpcClient._decode_reply, random.Random(7), [False]

    def decode_reply(self, method, payloads):
        if garbling[0] and self is other.engine.rpc:
            payloads = [garble(message, rng) for message in payloads]
        return original(self, method, payloads)

    monkeypatch.setattr(RpcClient, "_decode_reply", decode_reply)
    for _ in range(150):
        claim = other.claim(queue=queue, **shape)
        garbling[0] = True
        with suppress(LeaseholdError):
            assert not isinstance(run_sync(other.engine.attempt(claim, other.runtime.now() + 0.5)), Grant)
        mine = other.claim(**shape)._replace(token=5)
        for reply in run_sync(other.engine.renew([mine], other.runtime.now() + 0.5)):
            assert isinstance(reply, Unavailable | Gone), "a garbled reply renewed a grant that does not exist"
        with suppress(LeaseholdError):
            run_sync(other.engine.inspect("", "", False, other.runtime.now() + 0.5))
        garbling[0] = False
        other.engine.forget(claim)
        for pending in list(other.registry.pending_releases.values()):
            run_sync(other.engine.release(pending.claim, other.deadline()))
        other.registry.pending_releases.clear()
    left = run_sync(holder.engine.inspect("", "", False, holder.deadline()))
    assert [holding.token for holding in left] == [grant.token], "given-up claims were left in the queue"


def test_request_larger_than_the_window_is_sent_in_pieces(make_driver) -> None:
    rig = rig_or_skip(EtcdRig)
    driver = make_driver(f"etcd://{rig.cluster.hosts}/long")
    claims = []
    for number in range(90):
        claim = driver.claim(name=f"{number:03}" + "é" * 126, namespace="ü" * 127)
        claims.append(claim._replace(token=run_sync(driver.engine.attempt(claim, driver.deadline())).token))
    replies = run_sync(driver.engine.renew(claims, driver.deadline()))
    assert {type(reply).__name__ for reply in replies} == {"Alive"}
    assert len(run_sync(driver.engine.inspect("ü" * 127, "", False, driver.deadline()))) == 90
    for claim in claims:
        assert driver.release(claim)
