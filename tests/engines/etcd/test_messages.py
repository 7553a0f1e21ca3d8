"""Messages: round trips, garbled and hostile replies, lists of any length."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rigs.etcd import EtcdRig
from leasehold import LeaseholdError, Unavailable
from leasehold.engines.etcd import messages
from leasehold.engines.etcd.grpc import frames
from leasehold.engines.etcd.inspect import list_holdings
from leasehold.engines.etcd.queue import EntryValue
from leasehold.engines.etcd.rpc import RpcClient
from leasehold.errors import ListingTooLong
from leasehold.model import Gone, Grant, Holder, Holding
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_etcd

_numbers = st.integers(0, 2**63 - 1)


_kvs = st.builds(messages.KeyValue, st.binary(), _numbers, _numbers, st.binary(), st.integers(-(2**63), 2**63 - 1))


_headers = st.builds(messages.ResponseHeader, _numbers, _numbers, _numbers)


_ranged = st.builds(
    messages.RangeResponse, st.none() | _headers, st.lists(_kvs, max_size=3).map(tuple), *(_numbers,) * 2
)


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


_KEY_VALUE = messages.encode(messages.KeyValue(b"ab", 1 << 62, 1 << 61, b"cd", 1 << 60))


def _field(number: int, value: bytes) -> bytes:
    assert len(value) < 128
    return bytes([number << 3 | 2, len(value)]) + value


@pytest.mark.parametrize(
    ("kind", "item"),
    [
        pytest.param(messages.RangeResponse, _field(2, _KEY_VALUE), marks=pytest.mark.extended),
        pytest.param(messages.TxnResponse, _field(3, _field(1, _field(2, _KEY_VALUE))), marks=pytest.mark.faults),
        pytest.param(
            messages.WatchResponse,
            _field(11, _field(2, _KEY_VALUE) + _field(3, _KEY_VALUE)),
            marks=pytest.mark.faults,
        ),
        (messages.MemberListResponse, _field(2, b"")),
        (messages.StatusResponse, _field(8, "alarm:A\U0001f512".encode() * 8)),
    ],
    ids=["keys", "operations", "events", "members", "texts"],
)
def test_reply_of_very_many_items_is_refused_before_it_fills_the_memory(kind: type, item: bytes) -> None:
    """Of a reply of 8 MiB, the items of these would need 40 to 80."""
    data = item * (frames.MAX_REPLY // len(item))
    tracemalloc.start()
    try:
        with pytest.raises(messages.MalformedReply):
            messages.decode(kind, data)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


class ForgedRpc:
    """An `RpcClient` whose server lists this many claims, with these keys."""

    def __init__(self, count: int, key: bytes = b"lh1/q/:%05x/l/x/ab0") -> None:
        self._count, self._key, self._listed = count, key, 0
        self._value = EntryValue("ab" * 36, "held", 0, 0.0, Holder("w", "h", 1), 1.0).to_bytes()

    async def call(self, method: object, request: messages.RangeRequest, deadline: float) -> messages.RangeResponse:
        begin, self._listed = self._listed, min(self._listed + request.limit, self._count)
        kvs = (messages.KeyValue(self._key % number, 1, 1, self._value, 1) for number in range(begin, self._listed))
        more = int(self._listed < self._count)
        return messages.RangeResponse(messages.ResponseHeader(1, 2), tuple(kvs), self._count, more)

    async def call_each(self, method: object, requests: Sequence[object], deadline: float) -> list[Any]:
        return [messages.LeaseTtlResponse(None, 1, 20)] * len(requests)


def list_forged(rpc: ForgedRpc) -> list[Holding]:
    state: Any = SimpleNamespace(url=SimpleNamespace(root="lh1/"))
    return run_sync(list_holdings(state, cast(Any, rpc), "", "", False, 2.0, 0.0))


@pytest.mark.extended
def test_inspect_of_thirty_thousand_locks_takes_bounded_memory() -> None:
    tracemalloc.start()
    try:
        found = list_forged(ForgedRpc(30_000))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert [each.name for each in found] == [f"{number:05x}" for number in range(30_000)]


def test_list_without_end_is_unavailable() -> None:
    with pytest.raises(ListingTooLong, match="ask for the names with one prefix"):
        list_forged(ForgedRpc(10**9, b"lh1/q/:%09x/l/x/ab0"))


def test_page_with_keys_that_were_not_requested_is_unavailable() -> None:
    """Otherwise a server could send the same page without end."""
    for key in (b"lh1/q/:same/l/x/ab%.0d", b"lh1/r/:%05x/l/x/ab0"):
        with pytest.raises(Unavailable, match="not requested"):
            list_forged(ForgedRpc(10**9, key))


def test_queue_of_many_readers_is_listed_in_linear_time() -> None:
    """Each is a holder, because none ahead is a writer."""
    found = list_forged(ForgedRpc(20_000, b"lh1/q/:a/l/r/ab%05x"))
    assert {each.state for each in found} == {"held"}


def test_keys_of_several_pages_are_listed_once_and_as_of_the_first_page(monkeypatch, make_driver) -> None:
    rig = rig_or_skip(EtcdRig)
    driver = make_driver(f"etcd://{rig.cluster.hosts}/pages-{random.randrange(10**9)}")
    monkeypatch.setattr(messages, "MAX_PAGE", 2)
    claims = [driver.claim(name=f"n{number}") for number in range(5)]
    for claim in claims:
        assert isinstance(run_sync(driver.engine.attempt(claim, driver.deadline())), Grant)
    original, released = RpcClient.call, iter([True])

    async def call(self, method, request, *args):
        reply = await original(self, method, request, *args)
        if method is messages.RANGE and next(released, False):
            await driver.engine.release(claims[4], driver.deadline())
        return reply

    monkeypatch.setattr(RpcClient, "call", call)
    namespace = claims[0].namespace
    names = [each.name for each in run_sync(driver.engine.inspect(namespace, "", False, driver.deadline()))]
    assert names == ["n0", "n1", "n2", "n3", "n4"]
    names = [each.name for each in run_sync(driver.engine.inspect(namespace, "", False, driver.deadline()))]
    assert names == ["n0", "n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (messages.EmptyMessage, b"\x0a\x01\x08\x10\x01"),  # the integer of the header is behind its end
        (messages.EmptyMessage, b"\x0a" + probe_etcd.varint(-11)),  # the header ends where its field begins
        (messages.KeyValue, b"\x0a\x01\x03\x0a" + probe_etcd.varint(-12)),  # the key ends inside an earlier one
        (messages.EmptyMessage, b"\x10" + b"\x80" * 9),  # an unknown integer
        (messages.EmptyMessage, b"\x12" + probe_etcd.varint(-11)),  # an unknown text ends where its field begins
    ],
)
def test_field_that_leaves_its_message_is_refused(kind: type, data: bytes) -> None:
    with pytest.raises(messages.MalformedReply, match="truncated"):
        messages.decode(kind, data)


@pytest.mark.parametrize("field", [b"\x12\x01\x01", b"\x11" + bytes(8), b"\x08\x01"])
def test_known_field_of_another_wire_type_is_refused(field: bytes) -> None:
    with pytest.raises(messages.MalformedReply, match="wrong wire type"):
        messages.decode(messages.LeaseTtlResponse, field)


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


@pytest.mark.parametrize(
    ("kind", "queue"),
    [
        (("lock", 1), True),
        (("semaphore", 1), False),
        pytest.param(("lock", 1), False, marks=pytest.mark.faults),
        pytest.param(("semaphore", 1), True, marks=pytest.mark.faults),
    ],
)
def test_garbled_reply_is_never_a_grant_and_never_a_crash(monkeypatch, make_driver, queue, kind) -> None:
    rig = rig_or_skip(EtcdRig)
    url = f"etcd://{rig.cluster.hosts}/fuzz-{random.randrange(10**9)}"
    holder, other = make_driver(url), make_driver(url)
    shape = {"kind": kind[0], "limit": kind[1]}
    held = holder.claim(ttl=600, **shape)  # nothing renews it
    grant = run_sync(holder.engine.attempt(held, holder.deadline()))
    assert isinstance(grant, Grant)
    run_sync(other.engine.ping(other.deadline()))
    original, rng, garbling = getattr(*probe_etcd.DECODE_REPLY), random.Random(7), [False]

    def decode_reply(self, method, payloads):
        if garbling[0] and self is other.engine.rpc:
            payloads = [garble(message, rng) for message in payloads]
        return original(self, method, payloads)

    monkeypatch.setattr(*probe_etcd.DECODE_REPLY, decode_reply)
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
