"""`Idempotency-Key` for WSGI: the answers of the ASGI middleware, and the rules of WSGI."""

import io
import threading
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest

from leasehold import AsyncClient, Client, ConfigError
from leasehold.wsgi import IdempotencyKey

pytestmark = pytest.mark.filterwarnings("ignore:Unknown REQUEST_METHOD")


class Shop:
    """An application that counts the orders it takes."""

    def __init__(self, status: str = "201 Created", gate: threading.Event | None = None) -> None:
        self.status, self.gate, self.orders, self.closed = status, gate, [], 0

    def __call__(self, environ, start_response):
        self.orders.append(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"] or 0)))
        if self.gate:
            assert self.gate.wait(60)
        write = start_response(self.status, [("Content-Type", "text/plain"), ("X-Order", "yes")])
        write(b"order ")
        return Pieces(self, [str(len(self.orders)).encode()])


class Pieces(list):
    def __init__(self, shop, pieces) -> None:
        super().__init__(pieces)
        self._shop = shop

    def close(self) -> None:
        self._shop.closed += 1


def post(app, body=b"{}", key="k1", *, method="POST", path="/orders", **environ):
    """Send one request and return status, headers and body."""
    environ |= {"REQUEST_METHOD": method, "PATH_INFO": path, "SCRIPT_NAME": "", "QUERY_STRING": ""}
    environ |= {"CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body), "CONTENT_TYPE": "application/json"}
    if key is not None:
        environ["HTTP_IDEMPOTENCY_KEY"] = key
    setup_testing_defaults(environ)
    started, written = [], []

    def start_response(status, headers, exc_info=None):
        started.append((status, dict(headers)))
        return written.append

    pieces = validator(app)(environ, start_response)
    try:
        content = b"".join(pieces)
    finally:
        pieces.close()
    status, headers = started[0]
    return int(status[:3]), {name.lower(): value for name, value in headers.items()}, b"".join(written) + content


@pytest.fixture
def client():
    with Client("memory://") as client:
        yield client


def test_repeated_request_gets_the_first_answer(client) -> None:
    shop = Shop()
    app = IdempotencyKey(shop, client)
    first, again = post(app), post(app)
    assert (first[0], first[2], first[1]["x-order"]) == (201, b"order 1", "yes")
    assert (again[0], again[2], again[1]["idempotency-replayed"]) == (201, b"order 1", "true")
    assert (shop.orders, shop.closed) == ([b"{}"], 1)
    assert post(app, b"[]")[0] == 422
    assert post(app, key="k2")[2] == b"order 2"
    assert post(app, HTTP_AUTHORIZATION="another user")[2] == b"order 3"


def test_keys_of_users_whom_the_server_authenticated_are_separate(client) -> None:
    """Such a server may keep the Authorization header back, as mod_wsgi does."""
    shop = Shop()
    app = IdempotencyKey(shop, client)
    answers = [post(app, REMOTE_USER=user)[2] for user in ("alice", "bob", "alice")]
    assert answers == [b"order 1", b"order 2", b"order 1"]
    assert post(app)[2] == b"order 3"
    assert post(app, REMOTE_USER="alice", HTTP_AUTHORIZATION="Bearer x")[2] == b"order 4"


def test_requests_without_key_or_with_other_methods_pass_through(client) -> None:
    shop = Shop()
    app = IdempotencyKey(shop, client)
    assert [post(app, key=None)[2], post(app, key=None)[2], post(app, method="PUT")[2]] == [
        b"order 1",
        b"order 2",
        b"order 3",
    ]
    assert post(IdempotencyKey(shop, client, required=True), key=None)[0] == 400


def test_request_in_progress_gets_409_with_retry_after(client) -> None:
    shop = Shop(gate=threading.Event())
    app, first = IdempotencyKey(shop, client, keep="1h", retry_after="3s", ttl="1m"), []
    thread = threading.Thread(target=lambda: first.append(post(app)))
    thread.start()
    while not shop.orders:
        thread.join(0.005)
    busy = post(app)
    shop.gate.set()
    thread.join(60)
    assert (busy[0], busy[1]["retry-after"]) == (409, "3")
    assert busy[1]["content-type"] == "application/problem+json"
    assert first[0][0] == 201


def test_failed_request_may_be_repeated(client) -> None:
    shop = Shop("503 Service Unavailable")
    app = IdempotencyKey(shop, client)
    assert post(app)[0] == 503
    shop.status = "201 Created"
    assert post(app)[::2] == (201, b"order 2")

    def broken(environ, start_response):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        post(IdempotencyKey(broken, client), key="k3")


def test_unavailable_store_gets_503_and_nothing_is_processed() -> None:
    shop = Shop()
    with Client("redis://127.0.0.1:1", call_timeout=1) as client:
        assert post(IdempotencyKey(shop, client))[0] == 503
    assert shop.orders == []


def test_body_is_read_as_the_server_announces_it(client) -> None:
    shop = Shop()
    app = IdempotencyKey(shop, client, max_body=200_000)
    large = b"x" * 150_000
    assert post(app, large)[0] == 201
    assert post(app, b"x" * 200_001, key="k2")[0] == 413
    chunked = {"wsgi.input_terminated": True}
    assert post(app, large, key="k3", **chunked)[0] == 201
    assert shop.orders == [large, large]


def test_sender_that_disconnects_early_is_not_processed(client) -> None:
    shop, started = Shop(), []
    environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "10", "wsgi.input": io.BytesIO(b"half")}
    environ["HTTP_IDEMPOTENCY_KEY"] = "k1"
    setup_testing_defaults(environ)
    IdempotencyKey(shop, client)(environ, lambda *arguments: started.append(arguments))
    assert (started[0][0], shop.orders) == ("400 Bad Request", [])


def test_client_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"leasehold.wsgi needs a WSGI application and a Client"):
        IdempotencyKey(Shop(), AsyncClient("memory://"))
