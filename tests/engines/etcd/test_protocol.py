"""HTTP/2 and header compression: round trips, unusual framing, servers that send invalid bytes."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rigs.etcd import EtcdRig
from harness.servers.process import poll
from harness.servers.proxy import Proxy
from leasehold import Client, ConfigError, LeaseholdError, Unavailable
from leasehold.config import EngineConfig
from leasehold.engines.etcd import messages
from leasehold.engines.etcd.grpc import connect, frames
from leasehold.engines.etcd.grpc.connection import GrpcConnection
from leasehold.engines.etcd.grpc.frames import GrpcStream, encode_frame
from leasehold.engines.etcd.grpc.hpack import Header, HeaderDecoder, ProtocolError, encode_literal
from leasehold.engines.etcd.rpc import ClusterMemory, RpcClient
from leasehold.engines.etcd.url import parse_url
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads, boot_clock
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_etcd
from tests.support.client_fixtures import run_interrupted
from tests.support.timing import check_elapsed


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


LEASE_LIFE = messages.LeaseTtlResponse(messages.ResponseHeader(1, 7), 5, 9)
OK_MESSAGE = encode_frame(frames.DATA, 0, 1, frames.encode_message(messages.encode(LEASE_LIFE)))
OK_REPLY = encode_frame(frames.HEADERS, 4, 1, b"\x88") + OK_MESSAGE
END_HEADERS = encode_literal(b"grpc-status", b"0")


class FakeServer:
    """Reads a request on each connection, sends `replies` and keeps it open; sends `greeting` before the request."""

    def __init__(self, *replies: bytes, greeting: bytes = b"") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._greeting, self._replies = greeting, replies
        self.received = b""
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                connection.sendall(self._greeting)
                request = b""
                while b"/etcdserverpb" not in request:
                    request += connection.recv(65_536)
                self.received += request
                for part in self._replies:
                    connection.sendall(part)
                    time.sleep(0.005)  # pause: the next part is a segment of its own
                connection.settimeout(1)
                with suppress(TimeoutError):
                    while data := connection.recv(65_536):
                        self.received += data

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()
        self._thread.join(60)


@contextmanager
def rpc_to(server: FakeServer) -> Iterator[tuple[RpcClient, Threads]]:
    runtime = Threads()
    rpc = RpcClient(parse_url(EngineConfig.parse(f"etcd://127.0.0.1:{server.port}", 5.0)), runtime, ClusterMemory())
    try:
        yield rpc, runtime
    finally:
        rpc.close()
        server.close()


def test_keep_alive_of_another_lease_is_no_answer() -> None:
    """The client asked again, thousands of times a second, until the deadline of each renewal."""
    invalid = pytest.raises(Unavailable, match="invalid reply to a keep-alive")
    with rpc_to(FakeServer(OK_REPLY)) as (rpc, runtime), invalid:
        run_sync(rpc.keep_alive([6], runtime.now() + 30))


def test_no_address_is_tried_after_the_deadline() -> None:
    """Each of the addresses of a host took another millisecond, and a name server may give thousands."""
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        connect.open_socket(["127.0.0.1"] * 2, listener.getsockname()[1], lambda: 5.0, 5.0)


COMPLETE_REPLY = OK_REPLY + encode_frame(frames.HEADERS, 5, 1, END_HEADERS)


def call_fake_server(
    *replies: bytes, seconds: float = 10.0, requests: Sequence[bytes] = ()
) -> messages.LeaseTtlResponse:
    """The decoded reply, once the server has received all of `requests`."""
    server = FakeServer(*replies)
    with rpc_to(server) as (rpc, runtime):
        reply = run_sync(rpc.call(messages.LEASE_TTL, messages.LeaseId(5), runtime.now() + seconds))
        poll(lambda: all(each in server.received for each in requests), 30, lambda: f"{requests} have arrived")
        return reply


@pytest.mark.parametrize(
    "reply",
    [
        (OK_REPLY + encode_frame(frames.HEADERS, 5, 1, END_HEADERS),),
        (*(bytes([byte]) for byte in OK_REPLY), encode_frame(frames.HEADERS, 5, 1, END_HEADERS)),  # byte by byte
        (
            OK_REPLY,
            encode_frame(frames.HEADERS, 1, 1, END_HEADERS[:5]),
            encode_frame(frames.CONTINUATION, 4, 1, END_HEADERS[5:]),
        ),
        (
            OK_REPLY,
            encode_frame(frames.HEADERS, 5 | 8 | 32, 1, b"\x03" + bytes(5) + END_HEADERS + bytes(3)),
        ),  # padded, and with a priority
        (
            encode_frame(frames.SETTINGS, 0, 0, struct.pack(">HI", 4, 10)),
            OK_REPLY,
            encode_frame(frames.HEADERS, 5, 1, END_HEADERS),
        ),
        (encode_frame(77, 0, 0, b"a frame of the future"), OK_REPLY, encode_frame(frames.HEADERS, 5, 1, END_HEADERS)),
    ],
)
def test_valid_reply_is_decoded_in_every_framing(reply: tuple[bytes, ...]) -> None:
    assert call_fake_server(*reply) == LEASE_LIFE


def test_client_acknowledges_settings_and_pings() -> None:
    ping = encode_frame(frames.PING, 0, 0, b"12345678")
    acknowledged = (
        encode_frame(frames.SETTINGS, frames.ACK, 0, b""),
        encode_frame(frames.PING, frames.ACK, 0, b"12345678"),
    )
    call_fake_server(encode_frame(frames.SETTINGS, 0, 0, b""), ping, COMPLETE_REPLY, requests=acknowledged)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes(200),
        b"\xff" * 200,
        encode_frame(frames.PUSH_PROMISE, 4, 1, bytes(4)),
        encode_frame(frames.CONTINUATION, 4, 1, b""),
        encode_frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"),
        encode_frame(frames.RST_STREAM, 0, 1, struct.pack(">I", 7)),
        encode_frame(frames.GOAWAY, 0, 0, bytes(8)),
        encode_frame(frames.HEADERS, 5, 1, b"\x88"),  # no gRPC status
        encode_frame(frames.HEADERS, 5, 1, encode_literal(b":status", b"503")),
        encode_frame(
            frames.HEADERS,
            5,
            1,
            encode_literal(b"grpc-status", b"14") + encode_literal(b"grpc-message", b"etcdserver: no leader"),
        ),
        encode_frame(frames.HEADERS, 4, 1, b"\x88")
        + encode_frame(frames.HEADERS, 5, 1, END_HEADERS),  # status OK without a message
        OK_REPLY[:-4] + bytes(4) + encode_frame(frames.HEADERS, 5, 1, END_HEADERS),
        encode_frame(frames.HEADERS, 4, 1, b"\x88") + encode_frame(frames.DATA, 0, 1, b"\x01" + bytes(4)),  # compressed
        encode_frame(frames.HEADERS, 4, 1, b"\x88")
        + encode_frame(frames.DATA, 0, 1, b"\x00\xff\xff\xff\xff"),  # a length of 4 GiB
        b"",
    ],
)
def test_invalid_reply_is_unavailable_within_the_deadline(reply: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(LeaseholdError) as caught:
        call_fake_server(reply, seconds=0.3)
    assert isinstance(caught.value, Unavailable)
    check_elapsed(began, 0.3 + 0.5 + 1.5)  # the fake server takes up to 1 s to close


@contextmanager
def open_calls(*calls: GrpcStream, clock: Callable[[], float] = boot_clock) -> Iterator[GrpcConnection]:
    """A connection on which these calls, 1, 3, 5 and so on, wait for their replies."""
    connection = GrpcConnection(Threads(clock), "etcd", False)
    sock, server = socket.socketpair()
    probe_etcd.use_socket(connection, sock)
    for call in calls:
        connection.start(call, "/", b"", b"", True)
    with server:
        yield connection


def test_server_cannot_make_a_call_keep_many_messages() -> None:
    """An ordinary call has one. The client kept up to 8 MiB of them for each call until its deadline."""
    with open_calls(GrpcStream(None)) as connection:
        connection.receive(OK_REPLY)
        assert connection.failure is None
        connection.receive(OK_MESSAGE)
        assert "more messages than it can have" in str(connection.failure)


def test_server_cannot_make_a_client_keep_long_replies_to_many_calls() -> None:
    calls = [GrpcStream(None) for _ in range(3)]
    with open_calls(*calls) as connection:
        for call in calls:
            connection.receive(encode_frame(frames.DATA, 0, call.stream_id, struct.pack(">BI", 0, 7 << 20)))
        for call, piece in product(calls, [bytes(1 << 19)] * 13):
            if connection.failure is None:
                connection.receive(encode_frame(frames.DATA, 0, call.stream_id, piece))
        assert "the replies to all calls are too long" in str(connection.failure)
        assert sum(call.bytes_kept() for call in calls) < 17 << 20


def test_idle_watch_gets_answers_to_its_pings_for_days() -> None:
    """Each counted as a frame without a reply, so the watch of a lock that changed seldom was cut after 17 hours."""
    seconds = [0.0]
    with open_calls(GrpcStream(None), clock=lambda: seconds[0]) as connection:
        for _ in range(20_000):
            seconds[0] += 6.0
            connection.receive(encode_frame(frames.PING, frames.ACK, 0, bytes(8)))
        assert connection.failure is None
        connection.receive(encode_frame(frames.PING, frames.ACK, 0, bytes(8)) * 10_001)
        assert "frames without end" in str(connection.failure)


def test_batch_of_calls_shares_the_limit_of_one(caplog) -> None:
    """The replies of a batch are kept together until the first has come."""
    caplog.set_level("DEBUG", logger="leasehold.etcd")
    begin = encode_frame(frames.DATA, 0, 1, struct.pack(">BI", 0, frames.MAX_REPLY // 8 + 1))
    with rpc_to(FakeServer(begin)) as (rpc, runtime), pytest.raises(Unavailable):
        run_sync(rpc.call_each(messages.LEASE_TTL, [messages.LeaseId(5)] * 8, runtime.now() + 0.3))
    assert (
        "repeating them one by one: the server sent invalid HTTP/2: the messages of one call are too long"
        in caplog.text
    )


def window_update(stream_id: int, increment: int) -> bytes:
    return encode_frame(frames.WINDOW_UPDATE, 0, stream_id, struct.pack(">I", increment))


def test_client_waits_until_a_closed_window_opens(wait_until) -> None:
    """The client may not send a byte of the message before the window opens; here it opens in steps."""
    closed_window = encode_frame(frames.SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    server = FakeServer(
        window_update(1, 3), window_update(1, 2), window_update(1, 100), COMPLETE_REPLY, greeting=closed_window
    )
    with rpc_to(server) as (rpc, runtime):
        connection = run_sync(rpc.get_connection(runtime.now() + 5))
        wait_until(lambda: probe_etcd.initial_stream_window(connection) == 0)
        assert run_sync(rpc.call(messages.LEASE_TTL, messages.LeaseId(5), runtime.now() + 2)) == LEASE_LIFE
        message = frames.encode_message(messages.encode(messages.LeaseId(5)))
        for offset, size in ((0, 3), (3, 2), (5, len(message) - 5)):
            piece = encode_frame(frames.DATA, offset == 5, 1, message[offset : offset + size])
            wait_until(lambda piece=piece: piece in server.received)


@pytest.mark.parametrize(
    "reply",
    [
        (
            window_update(0, frames.MAX_INT31),
            window_update(0, frames.MAX_INT31),
            window_update(1, frames.MAX_INT31),
            COMPLETE_REPLY,
        ),  # beyond the largest window
        (window_update(0, 0), window_update(1, 0), window_update(77, 5), COMPLETE_REPLY),
        (encode_frame(frames.SETTINGS, 0, 0, struct.pack(">HI", 4, frames.MAX_INT31) * 200), COMPLETE_REPLY),
        (encode_frame(frames.PING, 0, 0, bytes(8)) * 2000, COMPLETE_REPLY),
        (encode_frame(frames.RST_STREAM, 0, 9, bytes(4)) * 500, COMPLETE_REPLY),
        (
            OK_REPLY,
            encode_frame(frames.GOAWAY, 0, 0, struct.pack(">II", 1, 0)),
            encode_frame(frames.HEADERS, 5, 1, END_HEADERS),
        ),  # the call may finish
        (
            encode_frame(frames.DATA, 8, 9, b"\xff"),
            COMPLETE_REPLY,
        ),  # padding longer than the frame, on an unknown stream
    ],
)
def test_unusual_frames_are_harmless(reply: tuple[bytes, ...]) -> None:
    assert call_fake_server(*reply) == LEASE_LIFE


@pytest.mark.parametrize(
    "reply",
    [
        encode_frame(frames.SETTINGS, 0, 0, b"12345"),
        encode_frame(frames.WINDOW_UPDATE, 0, 0, b"1"),
        encode_frame(frames.RST_STREAM, 0, 1, b""),
        encode_frame(frames.GOAWAY, 0, 0, b"123"),
        encode_frame(frames.DATA, 8, 1, b""),
        encode_frame(frames.HEADERS, 8, 1, b""),
        encode_frame(frames.HEADERS, 0, 1, b"\x88") + encode_frame(frames.DATA, 0, 1, b"x"),
        encode_frame(frames.HEADERS, 0, 1, b"\x88") + encode_frame(frames.CONTINUATION, 0, 3, b""),
        encode_frame(frames.HEADERS, 0, 1, b"\x88")
        + encode_frame(frames.CONTINUATION, 0, 1, encode_literal(b"x", bytes(16_000))) * 5,
        encode_frame(frames.HEADERS, 4, 1, encode_literal(b"x", bytes(70_000))),
        encode_frame(frames.HEADERS, 4, 1, b"\x3f\xe1\x7f"),  # a table size above the limit
        encode_frame(frames.HEADERS, 4, 1, b"\x80"),
        encode_frame(frames.HEADERS, 4, 1, b"\xff\x80\x80\x80\x80\x80\x01"),
        struct.pack(">I", 1 << 23)[1:] + bytes(6),
        encode_frame(frames.SETTINGS, 0, 0, struct.pack(">HI", 4, 10) * 3000),
        # Without end, and no reply: each costs time, and some are answered.
        encode_frame(frames.SETTINGS, 0, 0, b"") * 10_001,
        encode_frame(frames.PING, 0, 0, bytes(8)) * 10_001,
        window_update(0, 1) * 10_001,
        encode_frame(frames.DATA, 0, 1, b"") * 10_001,
        encode_frame(frames.HEADERS, 0, 1, b"\x88") + encode_frame(frames.CONTINUATION, 0, 1, b"") * 10_001,
        encode_frame(frames.HEADERS, 4, 99, encode_literal(b"x", bytes(60_000))) * 12,
        b"\x00",
    ],
)
def test_unreadable_frame_ends_the_connection_at_once(reply: bytes) -> None:
    unfinished = reply == b"\x00"  # may still become a complete frame
    seconds, began = 0.4 if unfinished else 30.0, time.monotonic()
    with pytest.raises(Unavailable) as caught:
        call_fake_server(reply, seconds=seconds)
    check_elapsed(began, seconds + 0.5 + 1.5)
    assert ("HTTP/2" in str(caught.value)) != unfinished, "an invalid frame was not reported at once"


def test_other_kind_of_server_is_named_as_a_possible_cause() -> None:
    with pytest.raises(Unavailable, match="check that the port is that of etcd"):
        call_fake_server(b"-ERR unknown command 'PRI', with args beginning with: '*' \r\n", seconds=30.0)


def test_tls_without_end_ends_the_connection(certificate) -> None:
    """Tickets. OpenSSL answers other messages of TLS, too, and the answers would fill the memory."""
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])
    context.num_tickets = 3000

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(connection, server_side=True) as tls:
            while tls.recv(65_536):
                pass

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=accept)
        server.start()
        url = f"etcds://127.0.0.1:{listener.getsockname()[1]}?ca={cert}"
        with Client(url, call_timeout=10) as client, pytest.raises(Unavailable, match="TLS itself without end"):
            client.ping()
        listener.shutdown(socket.SHUT_RDWR)
        server.join(30)


def test_header_bomb_costs_little_cpu_time() -> None:
    """One block of 61,000 bytes, each of which refers to a header of 4,000 bytes in the dynamic table."""
    learn = b"\x40" + encode_literal(b"x", bytes(4000))[1:]
    block = learn + b"\xbe" * 61_000
    pieces = [block[offset : offset + 16_000] for offset in range(0, len(block), 16_000)]
    reply = encode_frame(frames.HEADERS, 0, 1, pieces[0])
    reply += b"".join(encode_frame(frames.CONTINUATION, 0, 1, piece) for piece in pieces[1:])
    began = time.process_time()
    assert call_fake_server(reply + encode_frame(frames.CONTINUATION, 4, 1, b""), COMPLETE_REPLY) == LEASE_LIFE
    assert time.process_time() - began < 2.0


def test_trickled_reply_is_unavailable_at_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable):
        call_fake_server(*(bytes([byte]) for byte in COMPLETE_REPLY[:-1]), seconds=0.5)
    check_elapsed(began, 0.5 + 0.5 + 1.5)


def test_server_error_message_is_truncated_and_sanitized() -> None:
    headers = encode_literal(b"grpc-status", b"7") + encode_literal(
        b"grpc-message", b"no%0Aroot: all well%1B[2J" + b"x" * 5000
    )
    with pytest.raises(ConfigError) as caught:
        call_fake_server(encode_frame(frames.HEADERS, 5, 1, headers))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


def test_connection_out_of_stream_ids_is_replaced(make_driver, url) -> None:
    driver = make_driver(url)
    driver.release(driver.acquire(driver.claim()))
    first = probe_etcd.connection(driver.engine)
    probe_etcd.use_up_stream_ids(first)
    for _ in range(3):
        driver.release(driver.acquire(driver.claim()))
    assert probe_etcd.connection(driver.engine) is not first


@pytest.mark.extended
def test_member_behind_silent_ones_has_its_turn_in_a_later_call(start_member) -> None:
    """After a slow answer the first member of a call gets nine tenths of its time. If every call began with the same
    silent member, the last one would never have time for its answer."""
    member = start_member()
    proxies = first, second, last = [Proxy(member.port) for _ in range(3)]
    first.cut()
    second.cut()
    last.delay = lambda: 0.05
    hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
    runtime, memory = Threads(), ClusterMemory()
    memory.last_answer = 1.0
    rpc = RpcClient(parse_url(EngineConfig.parse(f"etcd://{hosts}", 5.0)), runtime, memory)

    def call() -> bool:
        with suppress(Unavailable):
            run_sync(rpc.call(messages.RANGE, messages.RangeRequest(b"x", b"y"), runtime.now() + 2.5))
            return True
        return False

    try:
        assert not call()
        assert any(call() for _ in range(3))
    finally:
        rpc.close()
        for proxy in proxies:
            proxy.close()


@pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_connecting_leaves_the_connection_to_the_next_call() -> None:
    with rpc_to(FakeServer()) as (rpc, runtime):

        def connect() -> None:
            run_sync(rpc.get_connection(runtime.now() + 5))

        number = 0
        while run_interrupted(number := number + 1, connect):
            connect()
            rpc.close()
        assert number > 30


def test_write_to_a_slow_reader_works_on_a_high_file_descriptor() -> None:
    """The send buffer fills up repeatedly, and the descriptor is above 1,024, where select() fails."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with rpc_to(FakeServer()) as (rpc, runtime):
            connection = run_sync(rpc.get_connection(runtime.now() + 5))
            assert probe_etcd.socket_of(connection).fileno() > 1024
            probe_etcd.socket_of(connection).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            probe_etcd.write(connection, encode_frame(frames.PING, frames.ACK, 0, bytes(8)) * 60_000)
            assert connection.failure is None
    finally:
        for each in files:
            os.close(each)
