"""A whole run of a server, with errors of every kind: no key, no id and no engine's address leaves it."""

import secrets
import signal
import socket
from datetime import UTC, datetime

import pytest

from harness.servers.redis import RedisServer
from leasehold.core.names import hash_id
from leasehold.server import keys
from leasehold.server.keys import Right
from tests.support.running_server import poll, run_serve, running
from tests.support.spans import Receiver

PASSWORD = "correct-horse-battery"


class Run:
    """Requests whose secrets are remembered, and everything that came back."""

    def __init__(self, server, path):
        self.server, self.answers, self.secrets = server, [], {PASSWORD}
        self.web = self._create(path, "web", "lock,read,break:shop:")
        self.spy = self._create(path, "spy", "read:shop:")
        poll(lambda: server.get("/v1/traits", key=self.spy).status == 200)

    def _create(self, path, who, *allow):
        key = keys.create(path, who, [Right.parse(text) for text in allow], now=datetime.now(UTC))
        self.secrets |= {key, key[-64:]}
        return key

    def new_id(self):
        made = secrets.token_hex(16)
        self.secrets |= {made, hash_id(made)}
        return made

    def ask(self, method, path, body=None, *, key=None, keep=True, **named):
        """`keep=False`: the answer is the caller's own lease, which contains its id."""
        answer = self.server.request(method, path, body, key=key, **named)
        if keep:
            self.answers.append(answer)
        return answer

    def use(self):
        """Every route, with good and bad requests."""
        held, waiting = self.new_id(), self.new_id()
        lease = {"namespace": "shop", "name": "orders/1"}
        granted = self.ask("POST", "/v1/acquire", {**lease, "id": held, "ttl": 60}, key=self.web, keep=False)
        assert granted.status == 200
        token = granted.json["token"]
        claim = {**lease, "id": waiting, "ttl": 30, "queue": True}
        client = {"Leasehold-Client": "c1"}
        for body in (
            {**lease, "id": waiting, "wait": 0.1},
            {**lease, "id": waiting, "ttl": "NaN"},
            {**lease, "id": waiting, "ttl": -1},
            {**lease, "id": f"{waiting} "},
            {**lease, "id": [waiting]},
            {"name": waiting * 20, "id": waiting},
            f'{{"name": "x", "id": "{waiting}"'.encode(),
            f'{{"id": "{waiting}", "id": "{waiting}\xff"}}'.encode("latin-1"),
        ):
            for key in (self.web, self.spy, None, self.web[:-1], self.web + "0"):
                self.ask("POST", "/v1/acquire", body, key=key)
        for path, body in (
            ("/v1/renew", {**lease, "id": held, "token": token + 1}),
            ("/v1/renew", {**lease, "id": held, "token": token}),
            ("/v1/renew", {**lease, "name": "orders/2", "id": held, "token": token}),
            ("/v1/renew-many", {"leases": [{**lease, "id": each, "token": token} for each in (held, waiting)]}),
            ("/v1/release", {**lease, "name": "orders/2", "id": held}),
            ("/v1/release", {**lease, "id": 5}),
            ("/v1/break", {**lease, "token": token + 1, "reason": "test"}),
            ("/v1/calls", [{"do": "attempt", "claim": claim}, {"do": "renew", "claims": [held]}]),
            ("/v1/calls", [{"do": "attempt", "claim": {**claim, "queue": held}}, {"do": "release", "claim": claim}]),
            ("/v1/calls", [{"do": "inspect", "namespace": "shop", "prefix": ""}]),
        ):
            for key in (self.web, self.spy):
                self.ask("POST", path, body, key=key, headers=client)
        self.look()
        # Answers may repeat a caller's own words; the log must not.
        self.ask("GET", f"/v1/locks?id={held}", key=self.web, keep=False)
        self.ask("GET", f"/{held}", key=self.web, keep=False)
        self.ask("POST", "/v1/acquire", {**lease, "mode": held, held: 1}, key=self.web, keep=False)
        self.ask("POST", "/v1/calls", [{"do": held}, {"do": "attempt", held: claim}], key=self.web, keep=False)
        self.ask("POST", "/v1/break", {**lease, "token": token, "reason": "test"}, key=self.web)
        self.look()
        self.ask("POST", "/v1/release", {**lease, "id": held}, key=self.web)
        self.raw(f"POST /v1/acquire HTTP/1.1\r\nAuthorization: Bearer {self.web}\r\nAuthorization: {held}\r\n\r\n")
        self.raw(f"POST /v1/acquire HTTP/1.1\r\nHost: x\r\nX: {self.web}\0{held}\r\n\r\n")
        self.raw(f"GET /{held} {self.web}\r\n\r\n")
        self.raw(f"GET / HTTP/1.1\r\nHost: x\r\nX: {self.web}{held}{'a' * 20_000}\r\n\r\n")

    def look(self):
        """What shows the present and the past."""
        for path in ("/v1/traits", "/metrics", "/openapi.json", "/readyz", "/v1/incidents"):
            self.ask("GET", path, key=self.spy)
        for path in ("/v1/locks", "/v1/locks?name=orders/1", "/v1/owners", "/v1/history?name=orders/1", "/v1/stats"):
            mark = "&" if "?" in path else "?"
            assert self.ask("GET", f"{path}{mark}namespace=shop", key=self.spy).status == 200

    def use_without_engine(self):
        lease = {"namespace": "shop", "name": "orders/9", "id": self.new_id()}
        for _ in range(8):  # enough for the circuit breaker to open
            assert self.ask("POST", "/v1/acquire", lease, key=self.web).status == 503
        self.ask("POST", "/v1/renew", {**lease, "token": 5}, key=self.web)
        self.ask("POST", "/v1/release", lease, key=self.web)
        self.ask("GET", "/v1/locks?namespace=shop", key=self.spy)
        self.ask("POST", "/v1/calls", [{"do": "release", "claim": {**lease, "ttl": 5}}, {"do": "ping"}], key=self.web)
        self.ask("GET", "/readyz")
        self.ask("GET", "/v1/incidents", key=self.spy)
        self.ask("GET", "/metrics", key=self.web)

    def raw(self, request):
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as connection:
            connection.sendall(request.encode())
            while connection.recv(65_536):
                pass

    def found_in(self, text):
        return sorted(secret for secret in self.secrets if secret in text)

    def check(self):
        for answer in self.answers:
            assert self.found_in(answer.body.decode()) == [], answer
        assert self.found_in(self.server.output) == []


@pytest.fixture
def engine():
    server = RedisServer(password=PASSWORD).start()
    yield server
    server.stop()


@pytest.mark.parametrize("log", ["json", "text"])
def test_no_secret_is_in_logs_answers_events_metrics_or_spans(tmp_path, engine, log):
    path, audit = tmp_path / "keys.toml", tmp_path / "audit.jsonl"
    path.touch(0o600)
    address = f"127.0.0.1:{engine.port}"
    flags = ["-vv", "--keys", str(path), "--log", log, "--audit-file", str(audit), "--call-timeout", "1", "--otel"]
    with Receiver() as receiver:
        variables = {"LEASEHOLD_SERVE_ENGINE": f"redis://:{PASSWORD}@{address}/0", **receiver.environment}
        run = use_a_server(flags, variables, path, engine)
    assert {"POST /v1/acquire", "leasehold.engine.attempt"} <= {span.name for span in receiver.spans}
    run.check()
    outputs = [answer.body.decode() for answer in run.answers] + list(map(repr, receiver.spans))
    for output in outputs:
        assert run.found_in(output) == []
        assert address not in output, "callers do not learn the engine's address"
    assert "\n" in audit.read_text()
    assert run.found_in(audit.read_text()) == []


def use_a_server(flags, variables, path, engine):
    with running(*flags, url=None, environment=variables) as server:
        run = Run(server, path)
        with server.stream("/v1/events?namespace=shop", key=run.spy) as watching:
            run.use()
            watching.wait_for("broken")
        assert run.found_in(watching.text) == []
        path.write_text(f"damaged {run.web}")
        server.process.send_signal(signal.SIGHUP)
        poll(lambda: "the old content stays in force" in server.output)
        engine.kill()  # every error that an engine without a server can cause
        run.use_without_engine()
    return run


@pytest.mark.parametrize("url", [f"redis://:{PASSWORD}@@h", f"redis://h/{PASSWORD}?x=1", f"no://:{PASSWORD}@h"])
def test_no_secret_is_in_the_errors_of_a_server_that_does_not_start(url):
    for variable in ("LEASEHOLD_URL", "LEASEHOLD_SERVE_ENGINE"):
        done = run_serve("--listen", "127.0.0.1:0", "-vv", url=None, **{variable: url})
        assert done.returncode == 78, done.stderr
        assert PASSWORD not in done.stdout + done.stderr
