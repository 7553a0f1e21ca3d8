"""Keys and certificates of a running server: who gets in, and changes of the files without a restart."""

import contextlib
import http.client
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest

from leasehold.server import keys
from leasehold.server.keys import Right
from tests.support.certificates import Authority
from tests.support.running_server import SECONDS, poll, run_serve, running
from tests.support.timing import check_elapsed


def create(path, who, *allow, certificate=False):
    rights = [Right.parse(text) for text in allow or ["read,lock,break:*:"]]
    return keys.create(path, who, rights, now=datetime.now(UTC), certificate=certificate)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.toml"


# -- the key file


@pytest.mark.parametrize("workers", ["1", "3"])
def test_changed_key_file_is_in_force_within_six_seconds(path, tmp_path, workers):
    old = create(path, "web")
    with running("--keys", str(path), "--workers", workers, url=f"sqlite:///{tmp_path}/locks.db") as server:

        def every_worker_answers(key, status):  # each connection may reach another one
            return all(server.get("/v1/traits", key=key).status == status for _ in range(20))

        assert every_worker_answers(old, 200)
        new = create(path, "web-2")
        keys.revoke(path, "web")
        began = time.monotonic()
        poll(lambda: server.get("/v1/traits", key=new).status == 200)
        poll(lambda: server.get("/v1/traits", key=old).status == 401)
        check_elapsed(began, 6.0)
        poll(lambda: every_worker_answers(new, 200))
        poll(lambda: every_worker_answers(old, 401))


def test_hangup_reads_the_key_file_and_never_ends_the_server(path):
    key = create(path, "web")
    with running("--keys", str(path)) as server:
        for _ in range(20):
            server.process.send_signal(signal.SIGHUP)
        poll(lambda: "the key file has been read again" in server.output)
        assert server.get("/v1/locks", key=key).status == 200
        path.write_text("damaged")
        server.process.send_signal(signal.SIGHUP)
        poll(lambda: "the old content stays in force" in server.output)
        assert server.get("/v1/locks", key=key).status == 200
        path.unlink()
        server.process.send_signal(signal.SIGHUP)
        poll(lambda: "keys.toml: No such file or directory" in server.output)
        assert server.get("/v1/locks", key=key).status == 200
        path.touch(0o600)
        poll(lambda: server.get("/v1/locks", key=key).status == 401)
        assert server.process.poll() is None


# -- what refuses to start


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--listen", "0.0.0.0:0"], "can be reached by other machines"),
        (["--listen", "0.0.0.0:0", "--tls-cert", "server.pem"], "can be reached by other machines"),
        (["--keys", "none.toml"], "the key file cannot be read: none.toml: No such file"),
        (["--keys", "bad.toml"], "bad.toml is not TOML"),
        (["--tls-cert", "bad.toml"], "the certificate bad.toml cannot be used"),
        (["--workers", "0"], "workers must be a whole number from 1 to 256"),
        (["--config", "bad.toml"], "bad.toml is not TOML"),
        (["--listen", "127.0.0.1:99999"], "with a port from 0 to 65535"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_bad_setting_refuses_to_start_with_code_78(tmp_path, arguments, complaint, check):
    (tmp_path / "bad.toml").write_text("damaged")
    arguments = [str(tmp_path / each) if each.endswith((".toml", ".pem")) else each for each in arguments]
    done = run_serve(*arguments, *(["--check"] if check else []))
    assert done.returncode == 78, done.stderr
    assert complaint in done.stderr.replace(f"{tmp_path}/", "")


def test_check_reads_everything_and_ends(tmp_path, path):
    create(path, "web")
    cert, key = Authority(tmp_path).issue("server", "DNS:localhost")
    config = tmp_path / "serve.toml"
    config.write_text(f'listen = ["0.0.0.0:7420"]\n[auth]\nkeys = "{path}"\n[tls]\ncert = "{cert}"\nkey = "{key}"\n')
    done = run_serve("--config", str(config), "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "leasehold: the settings are valid\n")
    done = run_serve("--check", LEASEHOLD_SERVE_WORKER="2")
    assert done.returncode == 78
    assert "did you mean LEASEHOLD_SERVE_WORKERS?" in done.stderr


def test_public_address_is_served_with_no_auth():
    with running("--listen", "0.0.0.0:0", "--no-auth") as server:
        assert server.post("/v1/acquire", {"name": "x"}).status == 200


def test_too_few_open_files_admit_fewer_connections():
    program = [
        sys.executable,
        "-m",
        "leasehold",
        "-u",
        "memory://",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--log",
        "text",
    ]
    line = f"ulimit -n 700; exec {shlex.join(program)}"
    with subprocess.Popen(["/bin/sh", "-c", line], stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stderr.readline, "")
            warning = next(line for line in lines if "open files" in line)
            assert "700 open files are permitted, too few for limits.connections = 10000, so 444 are" in warning
            started = next(line for line in lines if "listening on" in line)
            with contextlib.ExitStack() as stack:
                address = ("127.0.0.1", int(started.rpartition(":")[2]))
                for _ in range(600):
                    stack.enter_context(socket.create_connection(address, timeout=SECONDS))
        finally:
            process.terminate()
            _, rest = process.communicate(timeout=SECONDS)
        assert "can be accepted" not in rest, "files are left for the engine"


# -- Unix sockets


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def test_unix_socket_is_served_to_its_owner(tmp_path):
    where = f"{tmp_path}/leasehold.sock"
    with running("--listen", "127.0.0.1:0", "--listen", f"unix:{where}") as server:
        poll(lambda: f"listening on unix:{where}" in server.output)
        assert os.stat(where).st_mode & 0o777 == 0o600
        connection = UnixConnection(where)
        connection.request("POST", "/v1/acquire", b'{"name": "x"}')
        assert connection.getresponse().status == 200
        connection.close()


# -- certificates


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def tls_flags(authority):
    cert, key = authority.issue("server", "IP:127.0.0.1")
    return ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(authority.cert)]


def client(authority, *names):
    context = ssl.create_default_context(cafile=authority.cert)
    if names:
        context.load_cert_chain(*authority.issue("client", *names))
    return context


def test_name_of_a_client_certificate_has_the_rights_of_its_entry(authority, tls_flags, path):
    key = create(path, "keyed", "lock::")
    create(path, "web.internal", "lock:shop:orders/", certificate=True)
    create(path, "spiffe://shop/ops", "read:*:", certificate=True)
    with running("--keys", str(path), *tls_flags) as server:
        assert f"listening on https://127.0.0.1:{server.port}" in server.output
        body = {"namespace": "shop", "name": "orders/1"}
        web, ops = client(authority, "DNS:web.internal"), client(authority, "URI:spiffe://shop/ops")
        assert server.post("/v1/acquire", body, tls=web).json["name"] == "orders/1"
        assert server.get("/v1/locks?namespace=shop&prefix=orders/", tls=web).status == 403
        (holding,) = server.get("/v1/locks?namespace=shop", tls=ops).json["holdings"]
        assert holding["holder"] == "web.internal"
        assert server.post("/v1/acquire", body, tls=ops).status == 403
        for names in (["DNS:web.internal.evil"], ["DNS:other"], ["email:web.internal@x"], []):
            stranger = client(authority, *names)
            assert server.post("/v1/acquire", body, tls=stranger).status == 401, names
            assert server.get("/healthz", tls=stranger).status == 200
        without = client(authority)
        assert server.post("/v1/acquire", {"name": "x"}, key=key, tls=without).status == 200
        assert server.post("/v1/acquire", body, key="x", tls=web).status == 401, "a wrong key is wrong"
        keys.revoke(path, "web.internal")
        poll(lambda: server.post("/v1/acquire", body, tls=web).status == 401)


def test_certificates_alone_are_authentication(authority, tls_flags):
    with running("--listen", "0.0.0.0:0", *tls_flags) as server:
        assert server.post("/v1/acquire", {"name": "x"}, tls=client(authority, "DNS:web")).status == 200
        assert server.post("/v1/acquire", {"name": "y"}, tls=client(authority)).status == 401


@pytest.mark.parametrize("by", ["time", "hangup"])
def test_new_certificate_is_served_without_a_restart(authority, tls_flags, by):
    with running(*tls_flags) as server:

        def shown():
            connection = client(authority).wrap_socket(socket.socket(), server_hostname="127.0.0.1")
            with connection:
                connection.connect(("127.0.0.1", server.port))
                return connection.getpeercert(True)

        first = shown()
        authority.issue("server", "IP:127.0.0.1")
        began = time.monotonic()
        if by == "hangup":
            server.process.send_signal(signal.SIGHUP)
        poll(lambda: shown() != first)
        check_elapsed(began, 2.0)


def test_half_a_handshake_is_ended(tls_flags):
    with running(*tls_flags) as server, socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as half:
        half.sendall(b"\x16\x03\x01\x02")
        began = time.monotonic()
        assert half.recv(100) == b""
        check_elapsed(began, 7.0)
