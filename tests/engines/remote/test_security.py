"""API keys and certificates: who may call a server, and that the key appears nowhere else."""

import json
import logging
import pickle
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

import pytest

from leasehold import Client, ConfigError, LeaseholdError, Unavailable
from leasehold.config import API_KEY_VARIABLE, EngineConfig
from leasehold.engines.remote.servers import Servers
from leasehold.engines.remote.url import parse_url, read_api_key
from leasehold.errors import AccessDenied
from tests.support import probe
from tests.support.scripted_server import free_engine, problem, response

KEY = "lh_web_" + "5ec3e7" * 10


def create_key(keys, who, *allow):
    options = [word for rule in allow for word in ("--allow", rule)]
    command = [sys.executable, "-m", "leasehold", "serve", "key", "create", who, *options, "--keys", str(keys)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def write_key(path, key):
    path.write_text(f"{key}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def protected(start_lock_server, tmp_path):
    """A server, and the API keys of two callers."""
    keys = tmp_path / "keys.toml"
    web, reader = create_key(keys, "web", "lock,read:shop:orders/"), create_key(keys, "reader", "read:shop:")
    return start_lock_server("memory://", "--keys", str(keys)), web, reader


def test_key_of_the_environment_and_of_a_file_are_accepted(protected, monkeypatch, tmp_path):
    server, web, _ = protected
    monkeypatch.setenv(API_KEY_VARIABLE, web)
    url = f"http://127.0.0.1:{server.port}"
    with Client(url, namespace="shop") as client:
        client.lock("orders/1").acquire(wait=0).release()
    monkeypatch.setenv(API_KEY_VARIABLE, "lh_web_" + "0" * 64)  # the URL's file has precedence
    file = write_key(tmp_path / "api.key", web)
    with Client(f"{url}?api_key_file={file}", namespace="shop") as client:
        client.lock("orders/1").acquire(wait=0).release()


def test_call_without_right_or_key_is_denied(protected, monkeypatch):
    server, web, reader = protected
    url = f"http://127.0.0.1:{server.port}"
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    for key, name in (("", "orders/1"), ("lh_web_" + "0" * 64, "orders/1"), (reader, "orders/1"), (web, "users/1")):
        monkeypatch.setenv(API_KEY_VARIABLE, key)
        with Client(url, namespace="shop") as client, pytest.raises(AccessDenied) as error:
            client.lock(name).acquire(wait=0)
        assert not key or key not in str(error.value)
    monkeypatch.setenv(API_KEY_VARIABLE, web)
    with Client(url, namespace="shop") as client:
        lease = client.lock("orders/1").acquire()
        with pytest.raises(AccessDenied):
            client.break_lock("orders/1", token=lease.token)
        assert lease.held


@pytest.mark.parametrize("status", [200, 403, 503])
@pytest.mark.parametrize("key", [KEY, "a-key-of.another/program=="])
def test_request_that_a_proxy_repeats_shows_no_key_and_no_claim_id(start_server, monkeypatch, caplog, key, status):
    """Some error pages do, to help with finding errors."""
    ids = []

    def repeat(call):
        begin = server.heads[-1].index("uthorization: ")
        texts = [server.heads[-1][begin:]]
        if "claim" in call:
            ids.append(call["claim"]["id"].partition(".")[2])
            texts.append(json.dumps({"id": call["claim"]["id"]}))
        for text in texts:  # each alone, because texts are cut off
            repeated.append(text)
            made = problem("forbidden", status) if len(repeated) % 2 else problem("engine-unavailable", status)
            made["problem"]["detail"] = text
        return made if status == 200 else response(status, made["problem"])

    server, repeated = start_server(repeat), []
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    shown = []
    with Client(f"http://127.0.0.1:{server.port}", call_timeout=3) as client:
        for call in (client.lock("job").try_acquire, client.ping, client.inspect):
            with pytest.raises(LeaseholdError) as failure:
                call()
            shown.append(f"{failure.value} {failure.value!r} {vars(failure.value)}")
    assert ids
    for secret in (key, *ids):
        assert secret in " ".join(repeated)
        assert secret not in " ".join(shown)
        assert secret not in caplog.text


def test_lease_taken_over_without_the_right_is_denied(protected, monkeypatch):
    server, web, reader = protected
    url = f"http://127.0.0.1:{server.port}"
    monkeypatch.setenv(API_KEY_VARIABLE, web)
    with Client(url, namespace="shop") as client:
        text = client.lock("orders/1", require={"outlives"}).acquire(wait=0).hand_over()
        monkeypatch.setenv(API_KEY_VARIABLE, reader)
        with Client(url, namespace="shop") as other, pytest.raises(AccessDenied, match="reader may not lock"):
            other.take_over(text)
        monkeypatch.setenv(API_KEY_VARIABLE, web)
        with Client(url, namespace="shop") as successor:
            assert successor.take_over(text).release()


def test_ttl_beyond_the_limit_of_a_server_is_a_configuration_error(protected, monkeypatch):
    server, web, _ = protected
    monkeypatch.setenv(API_KEY_VARIABLE, web)
    with Client(f"http://127.0.0.1:{server.port}", namespace="shop", max_ttl="10d") as client:
        lease = client.lock("orders/1").acquire(wait=0)
        for call in (lambda: lease.ensure("2d"), lambda: lease.renew("2d")):
            with pytest.raises(ConfigError, match="at most 86400 s on a lock server"):
                call()
        assert lease.held
        assert lease.release()


def test_denied_attempt_is_not_followed_by_releases(start_lock_server, monkeypatch, tmp_path):
    """The client released what it had not got: a hundred requests, each in the audit log, until its time was over."""
    keys, audit = tmp_path / "keys.toml", tmp_path / "audit.log"
    monkeypatch.setenv(API_KEY_VARIABLE, create_key(keys, "reader", "read:shop:"))
    server = start_lock_server("memory://", "--keys", str(keys), "--audit-file", str(audit))
    with Client(f"http://127.0.0.1:{server.port}", namespace="shop") as client:
        for wait in (0, 5):
            with pytest.raises(AccessDenied):
                client.lock("orders/1").acquire(wait=wait)
    server.stop()  # a record may be written after the answer
    denied = [record for record in map(json.loads, audit.read_text().splitlines()) if record["action"] == "denied"]
    assert len(denied) == 2


def test_key_with_the_documented_right_can_use_every_call_of_a_lock(start_lock_server, monkeypatch, tmp_path):
    """The row of docs/security.md: `lock` for one namespace and prefix, and nothing else."""
    keys = tmp_path / "keys.toml"
    monkeypatch.setenv(API_KEY_VARIABLE, create_key(keys, "worker", "lock:shop:orders/"))
    url = f"http://127.0.0.1:{start_lock_server('memory://', '--keys', str(keys)).port}"
    with Client(url, namespace="shop") as client, Client(url, namespace="shop") as other:
        client.ping()
        lease = client.lock("orders/1").acquire(wait=0)
        lease.renew()
        assert other.lock("orders/1").try_acquire() is None
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.lock("orders/1").acquire, wait=60)
            lease.release()
            waiting.result().release()
        with client.rwlock("orders/2").read(), other.rwlock("orders/2").read():
            pass
        with client.semaphore("orders/3", limit=2), other.semaphore("orders/3", limit=2):
            pass
        with client.multilock(["orders/4", "orders/5"]):
            pass
        held = client.lock("orders/6").acquire(wait=0)
        denied = [
            lambda: client.inspect("orders/"),
            lambda: client.break_lock("orders/6", token=held.token),
            lambda: client.lock("orders").acquire(wait=0),
            lambda: client.lock("users/1").acquire(wait=0),
        ]
        for call in denied:
            with pytest.raises(AccessDenied):
                call()
        with Client(url, namespace="other") as elsewhere, pytest.raises(AccessDenied):
            elsewhere.lock("orders/6").acquire(wait=0)
        assert held.held


def test_denied_waiter_does_not_wait(protected, monkeypatch):
    server, web, _ = protected
    monkeypatch.setenv(API_KEY_VARIABLE, web)
    with Client(f"http://127.0.0.1:{server.port}", namespace="shop") as client, pytest.raises(AccessDenied):
        client.lock("users/1").acquire(wait=60)


def test_key_that_another_thread_has_read_again_is_used(tmp_path):
    file = write_key(tmp_path / "api.key", KEY)
    servers = Servers(parse_url(EngineConfig.parse(f"http://127.0.0.1:1?api_key_file={file}", 5.0)))
    refused = servers.authorization
    assert not servers.reload_api_key(refused)
    write_key(file, KEY[:-1] + "9")
    assert servers.reload_api_key(refused)
    assert servers.reload_api_key(refused), "for the call of the other thread"
    assert not servers.reload_api_key(servers.authorization)


def test_replaced_key_file_is_read_again(start_server, tmp_path):
    """A lease must not be lost because its key was replaced while the program runs."""
    old, new = KEY, KEY[:-1] + "9"

    def script(call):
        if server.heads[-1].count(f"Bearer {new}"):
            return free_engine(call)
        return response(401, problem("unauthorized")["problem"])

    server = start_server(script)
    file = write_key(tmp_path / "api.key", old)
    with Client(f"http://127.0.0.1:{server.port}?api_key_file={file}") as client:
        with pytest.raises(AccessDenied):
            client.lock("job").acquire(wait=0)
        write_key(file, new)
        client.lock("job").acquire(wait=0).release()
        write_key(file, "")
        client.lock("job").acquire(wait=0).release()


def test_key_that_is_another_each_time_is_tried_twice(start_server):
    """A function that makes a new key for each call was called, and the server asked, thousands of times a second until
    the deadline. Then the error said that the call had not been sent."""
    server = start_server(lambda call: response(401, problem("unauthorized")["problem"]))
    keys = (f"{KEY}{number}" for number in count())
    client = Client(f"http://127.0.0.1:{server.port}", password=lambda: next(keys))
    with client, pytest.raises(AccessDenied):
        client.lock("job").acquire(wait=0)
    assert server.verbs() == ["attempt"] * 2


def test_api_key_is_sent_but_shown_nowhere(start_server, monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    answers = [
        response(401, {"type": "x/unauthorized", "detail": "no"}),
        problem("engine-unavailable"),
        response(500, "x"),
        problem("invalid", 422),
    ]
    server = start_server(lambda call: answers[len(server.calls) % len(answers)])
    seen = []
    with Client(f"http://127.0.0.1:{server.port}", call_timeout=1, on_event=seen.append) as client:
        for _ in answers:
            with pytest.raises(LeaseholdError) as error:
                client.lock("job").acquire(wait=0)
            seen += [error.value, vars(error.value), error.value.__cause__, error.value.__context__]
        seen += [client, probe.config(client), probe.engine(client), pickle.dumps(client)]
        seen += [vars(probe.engine(client)), parse_url(probe.config(client))]
        server.close()
        with pytest.raises(Unavailable) as error:
            client.lock("job").acquire(wait=0)
        seen.append(error.value)
    assert KEY in "".join(server.heads)
    assert KEY not in repr(seen)
    assert KEY not in caplog.text


@pytest.mark.parametrize("status", [301, 302, 307, 308, 401, 407])
def test_redirect_to_another_host_gets_no_request(status, monkeypatch):
    """It would get the API key."""
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as server:
        target = b"http://127.0.0.1:%d/v1/calls" % other.getsockname()[1]
        answer = b"HTTP/1.1 %d X\r\nLocation: %b\r\nAlt-Svc: h2=%b\r\n" % (status, target, target)

        def serve():
            with suppress(OSError):
                while True:
                    connection = server.accept()[0]
                    with connection:
                        connection.recv(65_536)
                        connection.sendall(answer + b"Content-Length: 0\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        with Client(f"http://127.0.0.1:{server.getsockname()[1]}", call_timeout=5) as client:
            with pytest.raises(LeaseholdError) as error:
                client.ping()
            assert KEY not in str(error.value)
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("text", ["", " \n", "two words", "a\nb", "ä" * 8, "x" * 600, "\0"], ids=range(7))
def test_file_that_is_no_key_is_refused_and_not_shown(tmp_path, text):
    file = write_key(tmp_path / "api.key", text)
    with pytest.raises(ConfigError) as error:
        Client(f"http://127.0.0.1:1?api_key_file={file}")
    assert "two words" not in str(error.value)


def test_key_file_that_others_can_swap_is_refused(tmp_path):
    file = write_key(tmp_path / "api.key", KEY)
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="written by every user"):
        Client(f"http://127.0.0.1:1?api_key_file={file}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Client(f"http://127.0.0.1:1?api_key_file={tmp_path}/none")


def test_key_file_behind_a_link_of_its_owner_is_read(tmp_path, monkeypatch):
    """As Kubernetes mounts secrets."""
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    data = tmp_path / "..2026"
    data.mkdir()
    write_key(data / "key", KEY)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "key").symlink_to("..data/key")
    url = parse_url(EngineConfig.parse(f"http://h?api_key_file={tmp_path}/key", 5.0))
    assert read_api_key(url) == KEY


# URLs


@pytest.mark.parametrize(
    "url",
    [
        "http://user:password@h",
        "http://h1,h1",
        "http://h:0",
        "http://h:99999",
        "http://h:x",
        "http://h h",
        "http://[::1",
        "http://h,",
        "http://h/a b",
        "http://h\r\nX: y",
        "http://h/%0d%0a?x=1",
        "http://h?ca=/dev/null",
        "http://h?api_key=secret",
        "https://h?ca=/nowhere.pem",
        "https://h?cert_key=/dev/null",
        "https://h?ca=/dev/null",
    ],
)
def test_bad_url_is_refused_when_the_client_is_made(url):
    with pytest.raises(ConfigError):
        Client(url)


def test_url_parts_are_what_is_asked(start_server):
    server = start_server()
    with Client(f"http://127.0.0.1:{server.port}/locks/eu/") as client:
        client.ping()
    assert server.heads[0].startswith("POST /locks/eu/v1/calls HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{server.port}\r\n" in server.heads[0]


def test_default_port_and_ipv6_addresses():
    url = parse_url(EngineConfig.parse("http://h1,h2:80,[::1],[::1]:81", 5.0))
    assert [(each.host, each.port) for each in url.addresses] == [("h1", 7420), ("h2", 80), ("::1", 7420), ("::1", 81)]


def test_records_need_a_store(start_server):
    server = start_server()
    with Client(f"http://127.0.0.1:{server.port}") as client, pytest.raises(ConfigError, match="store="):
        client.once("key", lambda: 1)


# TLS


def openssl(*arguments):
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"openssl cannot make certificates: {done.stderr[-200:]}")


@pytest.fixture
def authority(tmp_path):
    """Makes certificates of one authority: (certificate, key) by name."""
    key, cert = tmp_path / "ca.key", tmp_path / "ca.pem"
    openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", 2, "-keyout", key, "-out", cert, "-subj", "/CN=ca"
    )

    def make(name, alternative):
        own_key, request, own = (tmp_path / f"{name}.{end}" for end in ("key", "csr", "pem"))
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", own_key, "-out", request, "-subj", f"/CN={name}")
        extensions = tmp_path / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternative}\n")
        sign = ("-CA", cert, "-CAkey", key, "-CAcreateserial", "-days", 2, "-extfile", extensions)
        openssl("x509", "-req", "-in", request, *sign, "-out", own)
        return own, own_key

    make.cert = cert
    return make


def test_tls_server_is_verified(start_lock_server, authority, tmp_path):
    cert, key = authority("server", "IP:127.0.0.1")
    server = start_lock_server("memory://", "--tls-cert", str(cert), "--tls-key", str(key))
    with Client(f"https://127.0.0.1:{server.port}?ca={authority.cert}") as client, client.lock("job") as lease:
        assert lease.held
    with Client(f"https://127.0.0.1:{server.port}") as client, pytest.raises(Unavailable, match="certificate"):
        client.lock("job").acquire(wait=0)
    with Client(f"https://localhost:{server.port}?ca={authority.cert}") as client, pytest.raises(Unavailable):
        client.lock("job").acquire(wait=0)  # the certificate is for the address alone


def test_client_certificate_identifies_the_caller(start_lock_server, authority, tmp_path):
    cert, key = authority("server", "IP:127.0.0.1")
    keys = tmp_path / "keys.toml"
    allow = ("--allow", "lock,read::orders/")
    command = [sys.executable, "-m", "leasehold", "serve", "key", "create", "web.example", "--certificate", *allow]
    subprocess.run([*command, "--keys", str(keys)], check=True, capture_output=True)
    tls = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(authority.cert))
    server = start_lock_server("memory://", "--keys", str(keys), *tls)
    own, own_key = authority("web", "DNS:web.example")
    url = f"https://127.0.0.1:{server.port}?ca={authority.cert}"
    with Client(f"{url}&cert={own}&cert_key={own_key}") as client:
        client.lock("orders/1").acquire(wait=0).release()
        with pytest.raises(AccessDenied):
            client.lock("users/1").acquire(wait=0)
    with Client(url) as client, pytest.raises(LeaseholdError):
        client.lock("orders/1").acquire(wait=0)


def test_encrypted_private_key_is_refused_without_a_prompt(authority, tmp_path):
    own, own_key = authority("web", "DNS:web.example")
    openssl("rsa", "-aes128", "-passout", "pass:x", "-in", own_key, "-out", tmp_path / "encrypted.key")
    with pytest.raises(ConfigError, match="encrypted"):
        Client(f"https://h?cert={own}&cert_key={tmp_path}/encrypted.key")


def test_tls_context_checks_names():
    url = parse_url(EngineConfig.parse("https://h", 5.0))
    assert url.tls.check_hostname
    assert url.tls.verify_mode == ssl.CERT_REQUIRED
