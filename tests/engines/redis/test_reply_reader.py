"""What a server may send: every reply is read as hiredis reads it, and what announces too much is refused first."""

from __future__ import annotations

from unittest.mock import patch

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.engines.redis.bounded_reader import MAX_DEPTH, MAX_ELEMENTS, BoundedReader
from tests.support import probe_redis

INTEGERS = st.integers(-(2**63), 2**63 - 1).map(lambda number: b":%d\r\n" % number)
STRINGS = st.binary(max_size=60).map(lambda raw: b"$%d\r\n%b\r\n" % (len(raw), raw))
TRICKY = st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"+OK\r\n", b"-ERR no\r\n", b"$5\r\n*9\r\n:\r\n"])
# What a queue makes a server send: that a claim has to wait, and published messages.
BUSY = STRINGS.map(lambda holder: b"*6\r\n:0\r\n:29999\r\n:4\r\n:17\r\n%b:1\r\n" % holder)
MESSAGES = st.builds(
    lambda kind, channel, text: b"*3\r\n" + kind + channel + text,
    st.sampled_from([b"$7\r\nmessage\r\n", b"$8\r\nsmessage\r\n"]),
    STRINGS,
    STRINGS,
)
REPLIES = st.recursive(
    INTEGERS | STRINGS | TRICKY | BUSY | MESSAGES,
    lambda parts: st.lists(parts, max_size=5).map(lambda found: b"*%d\r\n" % len(found) + b"".join(found)),
    max_leaves=20,
)


def read_all(reader, pieces: list[bytes]) -> list[str]:
    found = []
    for piece in pieces:
        reader.feed(piece)
        while (reply := reader.gets()) is not False:
            found.append(repr(reply))
    return found


@given(st.lists(REPLIES, max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_replies_are_read_as_hiredis_reads_them(replies, sizes) -> None:
    data, pieces = b"".join(replies), []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[:size])
        data = data[size:]
    assert read_all(BoundedReader(), pieces) == read_all(hiredis.Reader(), pieces)


TOO_MANY = b"*%d\r\n" % (MAX_ELEMENTS + 1)
FRAGMENTS = st.sampled_from(
    [b"*6\r\n:0\r\n:1\r\n:1\r\n:1\r\n", b"*3\r\n$7\r\nmessage\r\n", b":1\r\n", b"\r\n", b"abc\r\n", TOO_MANY]
) | st.integers(0, 40).map(lambda length: b"$%d\r\n" % length)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=16).map(b"".join))
def test_reply_of_a_queue_is_refused_like_any_other(data) -> None:
    """Also if a string is longer or shorter than it is said to be: behind it hiredis finds another header."""

    def outcome() -> str:
        try:
            return str(read_all(BoundedReader(), [data]))
        except hiredis.ProtocolError as refused:
            return str(refused)

    quick = outcome()
    with patch.object(*probe_redis.END_OF_QUEUE_REPLY, return_value=0):
        assert quick == outcome()


@pytest.mark.parametrize("size", [1, 3, 100_000])
@pytest.mark.parametrize(
    "data",
    [
        b"*1000000000\r\n",
        b"*4294967295\r\n",
        b"*%d\r\n" % (MAX_ELEMENTS + 1),
        b"*100000\r\n*100000\r\n",
        b"*1\r\n" * (MAX_DEPTH + 1),
        b":1\r\n*1000000000\r\n",
        b"$99999999999\r\n",
        b"%1000000000\r\n",
        b"*1\r\n%1000000000\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"+" + b"x" * 70_000,
    ],
)
def test_reply_that_announces_too_much_is_refused(data, size) -> None:
    reader, size = BoundedReader(), max(size, len(data) // 500)  # each piece of a long line is read anew
    with pytest.raises(hiredis.ProtocolError):
        read_all(reader, [data[start : start + size] for start in range(0, len(data), size)])


def test_list_that_began_in_an_earlier_piece_counts_as_a_level() -> None:
    read_all(BoundedReader(), [b"*2\r\n:1\r\n", b"*1\r\n" * (MAX_DEPTH - 1)])
    with pytest.raises(hiredis.ProtocolError, match="levels"):
        read_all(BoundedReader(), [b"*2\r\n:1\r\n", b"*1\r\n" * MAX_DEPTH])


def test_number_that_completes_a_list_is_not_a_reply_of_its_own() -> None:
    reader = BoundedReader()
    for _ in range(MAX_DEPTH + 1):  # if a list stayed open, the next ones would be nested too deep
        for piece in (b"*2\r\n", b":1\r\n", b":1\r\n"):
            reader.feed(piece)
        assert reader.gets() == [1, 1]


def test_error_reply_is_escaped() -> None:
    (reply,) = read_all(BoundedReader(), ["-ERR \x1b[31m \u202e\r\n".encode()])
    assert reply == repr(hiredis.ReplyError("ERR \\x1b[31m \\u202e"))


@pytest.mark.parametrize("size", [64, 100_000])
def test_batch_of_renewals_is_read_without_checking_each_number(size, monkeypatch) -> None:
    """However the replies are cut: only what is incomplete at a cut is checked number by number."""
    checked: list[bytes] = []
    check_header = getattr(*probe_redis.CHECK_HEADER)
    monkeypatch.setattr(
        *probe_redis.CHECK_HEADER, lambda self, *header: (checked.append(header), check_header(self, *header))[1]
    )
    data = b"*2\r\n:30000000\r\n:-1\r\n" * 500
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert read_all(BoundedReader(), pieces) == ["[30000000, -1]"] * 500
    assert len(checked) <= 3 * (len(pieces) - 1)


def test_replies_of_a_queue_are_read_without_checking_each_part(monkeypatch) -> None:
    monkeypatch.setattr(*probe_redis.CHECK_HEADER, None)
    busy = b"*6\r\n:0\r\n:29999000\r\n:8\r\n:1763472000123456\r\n$12\r\nhost\x00123\x00job\r\n:1\r\n"
    message = b"*3\r\n$7\r\nmessage\r\n$7\r\nlh1:c:a\r\n$24\r\nreserved 0 key 0123456\r\n\r\n"
    replies = read_all(BoundedReader(), [busy, message + message, busy + message])
    assert len(replies) == 5


@pytest.mark.parametrize("reply", [b"*%d\r\n", b"$%d\r\n"])
def test_each_of_several_servers_may_send_its_share(reply) -> None:
    limit = MAX_ELEMENTS if reply.startswith(b"*") else 8 << 20
    read_all(BoundedReader(5), [reply % (limit // 5)])
    with pytest.raises(hiredis.ProtocolError, match="too"):
        read_all(BoundedReader(5), [reply % (limit // 5 + 1)])


def test_strings_of_one_reply_are_counted_together() -> None:
    half = b"$%d\r\n" % (4 << 20) + bytes(4 << 20) + b"\r\n"
    read_all(BoundedReader(), [half, half, b"*3\r\n", half, half])
    with pytest.raises(hiredis.ProtocolError, match="too long strings"):
        read_all(BoundedReader(), [b"*3\r\n", half, half, b"$1\r\n"])
