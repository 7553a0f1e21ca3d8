"""HTTP as strangers speak it: endless, slow, ambiguous, or sent by a web page."""

import contextlib
import json
import socket
import ssl
import threading
import time

import pytest

from leasehold.server.auth import Caller
from leasehold.server.protocol import LINGER, MAX_HEADERS, MAX_PIPELINED, Bodies, Rules
from leasehold.server.settings import TLSFiles, read
from leasehold.server.tls import Certificates
from tests.support import probe_server
from tests.support.certificates import Authority
from tests.support.echo_server import poll, serving
from tests.support.timing import check_elapsed

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
QUICK = {"head_seconds": 0.3, "body_seconds": 0.6, "write_seconds": 0.6}  # far below the 5 s and 20 s of a server


@pytest.fixture
def echo():
    with serving() as app:
        yield app


@contextlib.contextmanager
def connected(app):
    with socket.create_connection(("127.0.0.1", app.port), timeout=60) as connection:
        yield connection


def read_all(connection):
    """Everything until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            received += part
    return received


def ask(app, request):
    """Send bytes, and return status and body of the one answer. The connection is then closed by the server."""
    with connected(app) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
        return parse(read_all(connection))


def parse(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def problem(answer):
    status, body = answer
    return status, json.loads(body)["type"].rpartition("/")[2]


def closing(request):
    return request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)


# -- size


def test_request_within_the_limits_is_answered(echo):
    head = b"GET /a?b HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 16_000 + b"\r\nConnection: close\r\n\r\n"
    status, body = ask(echo, head)
    assert (status, json.loads(body)["path"]) == (200, "/a")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 17_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 17_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * MAX_HEADERS + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-%d: aaaaaaaaaaaaaaaaaaaaa\r\n" * 1000 + b"\r\n",
        b"GET /" + b"a" * 400_000,
        b"\r\n" * 100_000,
        b"GET / HTTP/1.1\r\nHost: x\r\nX-" + b"a" * 400_000,
    ],
    ids=["value", "path", "count", "many", "endless path", "empty lines", "endless name"],
)
def test_large_head_is_refused(echo, head):
    assert problem(ask(echo, head)) == (431, "too-large")
    assert echo.requests == []


def test_headers_without_end_are_refused_early(echo):
    sent = 0
    with connected(echo) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for n in range(3000):
                connection.sendall(b"X-%d: " % n + b"a" * 32_000 + b"\r\n")
                sent += 32_000
    assert sent < 8_000_000, "96 MB were to be sent"
    poll(lambda: not echo.server.server_state.connections)


@pytest.mark.parametrize(("path", "limit"), [("/x", 65_536), ("/v1/calls", 1_048_576), ("/v1/renew-many?x", 1_048_576)])
def test_body_is_refused_above_its_limit_only(echo, path, limit):
    def head(length):
        return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode()

    status, body = ask(echo, head(limit) + b"x" * limit)
    assert (status, json.loads(body)["body"]) == (200, limit)
    echo.requests.clear()
    assert problem(ask(echo, head(limit + 1))) == (413, "too-large"), "before any byte of it"
    assert echo.requests == []


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNKED = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def test_body_in_chunks_is_refused_above_its_limit_only(echo):
    status, body = ask(echo, CHUNKED + chunk(b"x" * 40_000) + chunk(b"x" * 25_536) + b"0\r\n\r\n")
    assert (status, json.loads(body)["body"]) == (200, 65_536)
    assert problem(ask(echo, CHUNKED + chunk(b"x" * 40_000) + chunk(b"x" * 40_000))) == (413, "too-large")
    poll(echo.hung_up.is_set)


def test_chunks_of_one_byte_and_endless_trailers_are_refused(echo):
    assert problem(ask(echo, CHUNKED + chunk(b"x") * 100_000)) == (413, "too-large")
    assert problem(ask(echo, CHUNKED + b"0\r\nX-Trailer: " + b"a" * 400_000)) == (413, "too-large")


def test_trailer_is_not_taken_for_a_header(echo):
    status, body = ask(echo, CHUNKED + b"0\r\nAuthorization: Bearer x\r\n\r\n")
    assert status == 200
    assert "authorization" not in dict(json.loads(body)["headers"])


def test_bodies_of_all_callers_together_are_limited():
    head = b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"
    with serving(bodies=Bodies(100_000, 100_000)) as app, connected(app) as first:
        first.sendall(head + b"x" * 60_000)
        poll(lambda: app.requests == ["/slow"])
        answer = ask(app, head + b"x" * 60_000)
        assert problem(answer) == (503, "overloaded")
        app.gate.set()
        assert first.recv(65_536).startswith(b"HTTP/1.1 200")
        assert ask(app, closing(head) + b"x" * 60_000)[0] == 200
        first.sendall(head + b"x" * 30_000)
        poll(lambda: app.server.server_state.connections)
    rules = app.server.config.http_protocol_class.keywords["rules"]
    poll(lambda: rules.bodies.bytes == 0)


def test_first_body_on_a_connection_counts_for_its_caller():
    """Callers without a key shared their room with the first request of everybody: hosts without a key that used it up
    had the renewals of all callers on new connections refused. And one key could send more than its share."""

    def find_caller(authorization, names):
        return Caller(authorization.decode(), ()) if authorization else None

    def send(connection, authorization=b""):
        head = b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\nConnection: close\r\n"
        connection.sendall(head + authorization + b"\r\n" + b"x" * 60_000)

    bodies = Bodies(10**9, 100_000, 0)
    with serving(bodies=bodies, find_caller=find_caller) as app, contextlib.ExitStack() as stack:
        answered = []
        for number, authorization in enumerate((b"", b"Authorization: web\r\n"), 1):
            answered.append(stack.enter_context(connected(app)))
            send(answered[-1], authorization)
            poll(lambda expected=60_000 * number: bodies.bytes == expected)
            with connected(app) as above:
                send(above, authorization)
                assert problem(parse(read_all(above))) == (503, "overloaded")
        assert probe_server.bytes_by_caller(bodies) == {"": 60_000, "web": 60_000}
        app.gate.set()
        assert [parse(read_all(each))[0] for each in answered] == [200, 200]


# -- time


def test_head_that_does_not_arrive_is_ended():
    with serving(**QUICK) as app, connected(app) as half, connected(app) as silent, connected(app) as second:
        half.sendall(b"GET / HTTP/1.1\r\nHo")
        second.sendall(GET + b"GET")
        assert problem(parse(read_all(half))) == (408, "slow")
        assert problem(parse(read_all(silent))) == (408, "slow")
        assert read_all(second).count(b"HTTP/1.1 ") == 2
    assert app.requests == ["/"]


def test_bytes_that_trickle_in_do_not_extend_the_head(echo):
    with serving(**QUICK) as app, connected(app) as slow:
        began = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for byte in b"GET / HTTP/1.1\r\nHost: " + b"x" * 5000:
                slow.sendall(bytes([byte]))
                time.sleep(0.02)  # pause: a slow client
                if time.monotonic() - began > 60:
                    break
        check_elapsed(began, QUICK["head_seconds"] + LINGER + 1)
    assert app.requests == []


def test_body_that_does_not_arrive_is_ended():
    head = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345"
    with serving(**QUICK) as app:
        answer = ask(app, head)
        assert problem(answer) == (408, "slow")
        assert json.loads(answer[1])["done"] is False  # so clients try again
        poll(app.hung_up.is_set)
        assert problem(ask(app, CHUNKED + b"5\r\n123")) == (408, "slow")


def test_body_has_its_whole_time_after_a_slow_head():
    with serving(head_seconds=30, body_seconds=60) as app, connected(app) as slow:
        slow.sendall(b"POST /x HTTP/1.1\r\nHost: x\r\n")
        poll(lambda: any(probe_server.is_in_head(each) for each in app.server.server_state.connections))
        (protocol,) = app.server.server_state.connections
        head_timer = probe_server.read_timer(protocol)
        slow.sendall(b"Content-Length: 1\r\nConnection: close\r\n\r\n")
        poll(lambda: probe_server.is_in_body(protocol) and probe_server.read_timer(protocol) is not None)
        assert probe_server.read_timer(protocol) is not head_timer
        assert head_timer.cancelled()
        slow.sendall(b"x")
        assert parse(read_all(slow))[0] == 200


def test_answer_that_ends_before_the_body_is_not_followed_by_another():
    head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345"
    with serving(**QUICK) as app, connected(app) as connection:
        connection.sendall(head)
        assert read_all(connection).count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_caller_that_does_not_read_its_answer_is_ended(loop):
    with serving(loop, **QUICK) as app, connected(app) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        poll(lambda: app.requests)
        poll(lambda: not app.server.server_state.connections)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_caller_that_reads_its_answer_slowly_gets_all_of_it(loop):
    with serving(loop, write_seconds=600) as app, connected(app) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        slow.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        poll(lambda: any(probe_server.unsent_bytes(each) for each in app.server.server_state.connections))
        (protocol,) = app.server.server_state.connections
        received = b""
        for _ in range(3):
            before, expected = probe_server.unsent_bytes(protocol), len(received) + 300_000
            while len(received) < expected:
                received += slow.recv(expected - len(received))
            poll(lambda before=before: probe_server.unsent_bytes(protocol) < before)
            assert probe_server.let_write_time_pass(protocol)
        status, body = parse(received + read_all(slow))
        assert (status, len(json.loads(body)["large"])) == (200, 8_000_000)


def test_caller_that_stops_reading_its_answer_is_ended():
    with serving(write_seconds=600) as app, connected(app) as deaf:
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        poll(lambda: any(probe_server.unsent_bytes(each) for each in app.server.server_state.connections))
        (protocol,) = app.server.server_state.connections
        while app.server.server_state.connections:  # at first the kernel may still take some
            probe_server.let_write_time_pass(protocol)
            poll(lambda: not app.server.server_state.connections or probe_server.unsent_bytes(protocol))


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_answers_that_callers_do_not_read_are_limited_together(loop):
    """Ten thousand connections could each keep an answer of megabytes for twenty seconds."""
    unread = Bodies(10**9, 30_000)
    with serving(loop, unread=unread) as app, contextlib.ExitStack() as stack:
        for _ in range(4):
            deaf = stack.enter_context(connected(app))
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        poll(lambda: len(app.requests) == 4)
        poll(lambda: len(app.server.server_state.connections) <= 1)
        assert unread.bytes <= 30_000
        with connected(app) as reader:
            reader.sendall(closing(GET))
            assert parse(read_all(reader))[0] == 200
    assert unread.bytes == 0


def test_answer_that_is_not_read_is_counted_early_over_tls(tmp_path):
    """asyncio and uvloop let half a megabyte pile up before they say so."""
    cert, key = Authority(tmp_path).issue("server", "IP:127.0.0.1")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    unread = Bodies(10**9, 10**9)
    with (
        serving(certificates=Certificates(TLSFiles(cert, key)), unread=unread) as app,
        connected(app) as sock,
        context.wrap_socket(sock) as deaf,
    ):
        deaf.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        poll(lambda: unread.bytes)
        assert unread.bytes < 200_000


def test_answer_that_is_read_slowly_counts_only_while_it_is_not_read():
    unread = Bodies(10**9, 1_000_000)
    with serving(unread=unread) as app:
        with connected(app) as slow:
            slow.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            received = 0
            while received < 50_000_000:
                received += len(slow.recv(1_000_000))
            assert unread.bytes <= 1_000_000
        poll(lambda: not app.server.server_state.connections)
    assert unread.bytes == 0


# -- connections


def test_connection_above_the_limit_is_told_so_and_closed():
    with serving(connections=2) as app, connected(app) as first, connected(app) as second:
        poll(lambda: len(app.server.server_state.connections) == 2)
        answer = ask(app, GET)
        assert problem(answer) == (503, "overloaded")
        assert json.loads(answer[1])["done"] is False
        first.sendall(closing(GET))
        assert parse(read_all(first))[0] == 200
        second.close()
        poll(lambda: not app.server.server_state.connections)
        assert ask(app, closing(GET))[0] == 200


def test_pipelined_requests_are_answered_in_order_up_to_a_limit(echo):
    requests = [GET.replace(b"/", b"/%d" % n, 1) for n in range(MAX_PIPELINED)]
    with connected(echo) as connection:
        connection.sendall(b"".join(requests[:-1]) + closing(requests[-1]))
        answers = read_all(connection)
    assert [f"/{n}" for n in range(MAX_PIPELINED)] == echo.requests
    assert answers.count(b"HTTP/1.1 200") == MAX_PIPELINED


def test_pipeline_without_end_is_stopped_after_the_answer_under_way(echo):
    with connected(echo) as connection:
        connection.sendall(GET.replace(b"/", b"/slow", 1) + GET * 1000)
        poll(lambda: echo.requests == ["/slow"])
        (protocol,) = echo.server.server_state.connections
        poll(lambda: probe_server.reads_no_more(protocol))
        assert len(protocol.pipeline) <= MAX_PIPELINED
        echo.gate.set()
        assert read_all(connection).count(b"HTTP/1.1 ") == 1
    assert echo.requests == ["/slow"]


def test_caller_that_hangs_up_behind_a_pipelined_request_is_noticed(echo):
    with connected(echo) as connection:
        connection.sendall(GET.replace(b"/", b"/slow", 1))
        poll(lambda: echo.requests == ["/slow"])
        connection.sendall(b"GET /next HTTP/1.1\r\n")
    poll(echo.hung_up.is_set)


@pytest.mark.parametrize("behind", [b"", GET, GET * 3], ids=["alone", "one behind", "three behind"])
def test_connection_of_a_caller_that_left_behind_its_requests_ends(echo, behind):
    """The server kept its descriptor for ever if another request followed: it read no end of the connection."""
    with connected(echo) as connection:
        connections = echo.server.server_state.connections
        poll(lambda: connections)
        (protocol,) = connections
        held, released = threading.Event(), threading.Event()
        protocol.loop.call_soon_threadsafe(lambda: (held.set(), released.wait(60)))
        assert held.wait(60)
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" + behind)
    released.set()
    poll(lambda: not connections)
    assert echo.requests == ["/"], "those behind it are not carried out"


def test_connection_that_ended_is_no_longer_a_stranger():
    strangers = {}
    with serving(strangers=strangers) as app:
        with connected(app):
            poll(lambda: strangers)
        poll(lambda: not strangers)


# -- framing


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Content-Length:\r\n",
        b"Transfer-Encoding: chunked, chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n",
        b" folded: x\r\n",
        b"X: a\r\n b\r\n",
        b"X\x00: a\r\n",
        b"X: a\x00b\r\n",
        b"X: a\rb\r\n",
        b"Host: y\r\n",
        b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n",
        b"authorization: Bearer a\r\nAUTHORIZATION: Bearer b\r\n",
        b"Leasehold-Client: a\r\nLeasehold-Client: b\r\n",
    ],
)
def test_ambiguous_request_is_refused(echo, lines):
    status, _ = ask(
        echo, b"POST /x HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    assert status in (400, 413)
    assert "/smuggled" not in echo.requests
    assert echo.requests == []


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["no host", "chunked 1.0", "connect", "http2", "tls", "version", "text", "path", "chunk size"],
)
def test_what_is_not_http_is_refused(echo, request_):
    assert problem(ask(echo, request_)) == (400, "invalid")


def test_upgrade_is_ignored_and_the_connection_ends(echo):
    lines = b"Connection: upgrade\r\nUpgrade: websocket\r\n"
    request = GET.replace(b"Host: x\r\n", b"Host: x\r\n" + lines) + GET.replace(b"/", b"/next", 1)
    with connected(echo) as connection:
        connection.sendall(request)
        assert read_all(connection).count(b"HTTP/1.1 200") == 1
    assert echo.requests == ["/"]


# -- web pages


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"", 200),
        (b"Origin: http://localhost:1\r\n", 200),
        (b"Sec-Fetch-Site: same-origin\r\n", 200),
        (b"Sec-Fetch-Site: none\r\n", 200),
        (b"Origin: http://evil.example\r\n", 403),
        (b"Origin: http://localhost:2\r\n", 403),
        (b"Origin: null\r\n", 403),
        (b"Origin: \xff\r\n", 403),
        (b"Sec-Fetch-Site: cross-site\r\n", 403),
        (b"Sec-Fetch-Site: same-site\r\n", 403),
        (b"Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n", 403),
    ],
)
def test_web_page_of_another_origin_is_refused(echo, lines, status):
    request = b"POST /x HTTP/1.1\r\nHost: localhost:1\r\nConnection: close\r\n" + lines + b"\r\n"
    assert ask(echo, request)[0] == status


def test_link_on_another_page_may_be_followed(echo):
    lines = b"Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: %s\r\nConnection: close\r\n\r\n"
    assert ask(echo, b"GET / HTTP/1.1\r\nHost: x\r\n" + lines % b"navigate")[0] == 200
    assert ask(echo, b"GET / HTTP/1.1\r\nHost: x\r\n" + lines % b"no-cors")[0] == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost", 200),
        (b"LOCALHOST:7420", 200),
        (b"127.0.0.1:7420", 200),
        (b"[::1]:7420", 200),
        (b"127.0.0.2", 200),
        (b"evil.example:7420", 403),
        (b"localhost.evil.example", 403),
        (b"", 403),
    ],
)
def test_name_of_a_rebound_host_is_refused_without_authentication(host, status):
    rules = Rules.of(read({"listen": ("127.0.0.1:0", "127.0.0.2:0")}, {}, None))
    with serving(hosts=rules.hosts) as app:
        assert ask(app, b"GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % host)[0] == status


@pytest.mark.parametrize(
    "flags", [{"keys": "/k"}, {"listen": ("0.0.0.0:1",), "no_auth": True}, {"listen": ("unix:/run/x",)}]
)
def test_every_host_is_accepted_where_a_browser_has_no_key(flags):
    assert Rules.of(read(flags, {}, None)).hosts is None
