"""HTTP responses and event streams: however the bytes are cut, what is complete is read, and doubt is refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.engines.remote.parsing import (
    KEEP_ALIVE,
    MAX_BODY,
    MAX_EVENT,
    MAX_HEAD,
    MAX_HEADERS,
    Response,
    ResponseParser,
    StreamParser,
)
from tests.support import probe_remote

OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;note=x\r\nlo\r\n0\r\nTrailer: x\r\n\r\n"
STREAM = OK + b"content-type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def read(parser, *pieces):
    found = []
    for piece in pieces:
        parser.feed(piece)
        while (reply := parser.gets()) is not False:
            found.append(reply)
    return found


def pieces(data, cuts):
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(places)]


@pytest.mark.parametrize("response", [PLAIN, CHUNKED], ids=["length", "chunked"])
@given(st.lists(st.integers(0, 500), max_size=12))
def test_response_is_the_same_however_it_is_cut(response, cuts):
    parser = ResponseParser()
    assert read(parser, *pieces(response + PLAIN, cuts)) == [Response(200, b"hello")] * 2
    assert not parser.mid_reply


def test_response_byte_by_byte_is_complete_only_with_its_last():
    for response in (PLAIN, CHUNKED):
        for end in range(len(response)):
            parser = ResponseParser()
            assert read(parser, response[:end]) == []
            assert parser.mid_reply is (end != 0)


@given(st.lists(st.integers(0, 500), max_size=12))
def test_events_are_the_same_however_they_are_cut(cuts):
    body = b": beat\n\ndata: [1]\n\nevent: x\ndata: [2,\ndata: 3]\n\n\n\ndata:[4]\r\n\r\n"
    stream = STREAM + b"".join(chunk(piece) for piece in pieces(body, cuts) if piece)
    found = read(StreamParser(), *pieces(stream, cuts))
    assert found[0] == Response(200, b"", is_stream=True)
    assert found[1:] == [KEEP_ALIVE, b"[1]", b"[2,\n3]", b"[4]"]


def test_stream_without_chunks_ends_with_its_connection():
    head = OK + b"Content-Type: text/event-stream\r\n\r\n"
    assert read(StreamParser(), head + b"data: 1\n\ndata: 2") == [Response(200, b"", is_stream=True), b"1"]


def test_stream_that_the_server_ends_is_a_lost_connection():
    parser = StreamParser()
    parser.feed(STREAM + chunk(b"data: 1\n\n") + b"0\r\n\r\n")
    assert [parser.gets(), parser.gets()] == [Response(200, b"", is_stream=True), b"1"]
    with pytest.raises(ConnectionResetError):
        parser.gets()


@pytest.mark.parametrize("head", [b"HTTP/1.1 503 X\r\n", b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"])
def test_stream_that_is_refused_is_a_whole_response(head):
    parser = StreamParser()
    found = read(parser, head + b"Content-Length: 2\r\n", b"\r\n{", b"}")
    assert found == [Response(int(head.split()[1]), b"{}")]


def test_interim_responses_are_skipped_and_bounded():
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert read(ResponseParser(), interim * 8 + PLAIN) == [Response(200, b"hello")]
    with pytest.raises(ConnectionAbortedError):
        read(ResponseParser(), interim * 9)


@pytest.mark.parametrize(
    ("header", "closing"),
    [(b"Connection: close", True), (b"Connection: Keep-Alive", False), (b"Connection: x, Close", True)],
)
def test_connection_header_decides_whether_it_is_reused(header, closing):
    (response,) = read(ResponseParser(), OK + header + b"\r\nContent-Length: 0\r\n\r\n")
    assert response.closing is closing


def test_http_1_0_response_closes_unless_it_says_otherwise():
    (response,) = read(ResponseParser(), b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert response.closing
    keeping = b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n"
    (response,) = read(ResponseParser(), keeping)
    assert not response.closing


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        OK + b"\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 0x5\r\n\r\n",
        OK + b"Content-Length: \xb2\r\n\r\n",
        OK + b"Content-Length: 99999999\r\n\r\n",
        OK + b"Content-Length: 99999999999999999999\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 300,
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 4_000,
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + (b"800000\r\n" + b"x" * 0x800000 + b"\r\n"),
        OK + b"no colon\r\n\r\n",
        OK + b" folded: x\r\n\r\n",
        OK + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        OK + b"a: " + b"x" * MAX_HEAD,
    ],
    ids=range(24),
)
def test_response_of_no_leasehold_server_is_refused(data):
    with pytest.raises(ConnectionAbortedError):
        read(ResponseParser(), data)


def test_event_without_end_is_refused():
    with pytest.raises(ConnectionAbortedError):
        read(StreamParser(), STREAM, *[chunk(b"data: " + b"x" * 65_536)] * (MAX_EVENT // 65_536 + 1))


@given(st.binary(max_size=400))
def test_any_bytes_raise_nothing_but_connection_errors(data):
    for parser in (ResponseParser(), StreamParser()):
        for begin in (b"", OK, OK + b"Transfer-Encoding: chunked\r\n\r\n", STREAM):
            try:
                read(parser, begin + data)
            except ConnectionError:
                continue


def test_large_body_costs_no_more_than_its_size():
    parser = ResponseParser()
    parser.max_body = MAX_BODY
    parser.feed(OK + b"Content-Length: %d\r\n\r\n" % (1 << 20))
    copied = 0
    for _ in range(16):
        parser.feed(b"x" * 65_536)
        reply = parser.gets()
        copied += probe_remote.unread_bytes(parser)
    assert isinstance(reply, Response)
    assert len(reply.body) == 1 << 20
    assert copied == 0  # no byte is looked at twice
