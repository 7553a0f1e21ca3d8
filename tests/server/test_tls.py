"""Certificates of the server and of its callers, and their replacement while the server runs."""

import contextlib
import http.client
import json
import logging
import os
import socket
import ssl
import time

import pytest

from leasehold.errors import ConfigError
from leasehold.server.settings import TLSFiles
from leasehold.server.tls import Certificates, names_in
from tests.support import probe_server
from tests.support.certificates import Authority
from tests.support.echo_server import serving


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def files(authority):
    server = authority.issue("server", "DNS:localhost", "IP:127.0.0.1")
    return TLSFiles(server.cert, server.key, authority.cert)


def client_context(authority, certificate=None, version=None):
    context = ssl.create_default_context(cafile=authority.cert)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


@contextlib.contextmanager
def connection(app, context):
    caller = http.client.HTTPSConnection("localhost", app.port, context=context, timeout=60)
    try:
        yield caller
    finally:
        caller.close()


def ask(app, context):
    """The names that the server saw, and the certificate that it showed."""
    with connection(app, context) as caller:
        return exchange(caller)


def exchange(caller):
    caller.request("GET", "/")
    answer = caller.getresponse()
    return json.loads(answer.read())["names"], caller.sock.getpeercert(True)


def refresh(certificates):
    """Two checks of the files: they are read once they no longer change."""
    for _ in range(2):
        certificates.refresh()


def replace_with(files, certificate):
    os.replace(certificate.cert, files.cert)
    os.replace(certificate.key, files.key)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_names_of_a_client_certificate_reach_the_application(authority, files, loop, version):
    web = authority.issue("web", "DNS:web.internal", "URI:spiffe://shop/web", "email:x@y", "IP:10.0.0.1")
    with serving(loop, Certificates(files)) as app:
        assert ask(app, client_context(authority, web, version))[0] == ["web.internal", "spiffe://shop/web"]
        assert ask(app, client_context(authority, None, version))[0] == [], "no certificate, no name"


def test_subject_of_a_certificate_is_no_name(authority, files):
    with serving(certificates=Certificates(files)) as app:
        assert ask(app, client_context(authority, authority.issue("plain")))[0] == []


def test_certificate_of_another_authority_is_refused(authority, files, tmp_path):
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "ca").issue("web", "DNS:web.internal")
    with serving(certificates=Certificates(files)) as app:
        with pytest.raises((ssl.SSLError, OSError)):
            ask(app, client_context(authority, stranger))
        assert app.requests == []


def test_expired_client_certificate_is_refused(authority, files):
    with serving(certificates=Certificates(files)) as app:
        with pytest.raises((ssl.SSLError, OSError)):
            ask(app, client_context(authority, authority.issue("old", "DNS:web.internal", days=-1)))
        assert app.requests == []


def test_certificate_that_expires_on_an_open_connection_names_no_caller(authority, files):
    with serving(certificates=Certificates(files)) as app:
        context = client_context(authority, authority.issue("web", "DNS:web.internal"))
        with connection(app, context) as caller:
            assert exchange(caller)[0] == ["web.internal"]
            (protocol,) = app.server.server_state.connections
            assert probe_server.names_until(protocol) > time.time()
            probe_server.set_names_until(protocol, time.time() - 1)
            assert exchange(caller)[0] == []


def test_client_certificate_is_not_asked_for_without_an_authority(authority, files):
    with serving(certificates=Certificates(TLSFiles(files.cert, files.key))) as app:
        assert ask(app, client_context(authority, authority.issue("web", "DNS:web.internal")))[0] == []


def test_old_versions_of_tls_are_refused(authority, files):
    context = Certificates(files).context
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_new_certificate_is_served_while_old_connections_go_on(authority, files, loop):
    certificates = Certificates(files)
    with serving(loop, certificates) as app:
        context = client_context(authority)
        with connection(app, context) as old:
            _, first = exchange(old)
            replace_with(files, authority.issue("next", "DNS:localhost"))
            refresh(certificates)
            _, second = ask(app, context)
            assert second != first
            assert exchange(old)[1] == first


def test_pair_that_does_not_fit_changes_nothing_and_is_logged(authority, files, caplog):
    certificates = Certificates(files)
    with serving(certificates=certificates) as app:
        context = client_context(authority)
        _, first = ask(app, context)
        os.replace(authority.issue("next", "DNS:localhost").cert, files.cert)
        for _ in range(3):
            certificates.refresh()
        assert ask(app, context)[1] == first
        (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "the old content stays in force" in line.getMessage()
        assert "key values mismatch" in line.getMessage()
        replace_with(files, authority.issue("third", "DNS:localhost"))
        refresh(certificates)
        assert ask(app, context)[1] != first


def resumed(app, context, session=None):
    """The names that the server saw, and the session; resumed from `session`."""
    with (
        socket.create_connection(("127.0.0.1", app.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as sock,
    ):
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        names = json.loads(answer.read())["names"]
        assert sock.recv(1) == b"", "a session can be resumed once its connection has ended well"
        return names, sock.session, sock.session_reused


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_session_does_not_outlive_the_trust_in_its_authority(authority, files, tmp_path, loop):
    """TLS 1.2 resumes sessions by their id, and does not verify their certificates again."""
    (tmp_path / "other").mkdir()
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(authority.cert.read_bytes())
    certificates = Certificates(TLSFiles(files.cert, files.key, trusted))
    with serving(loop, certificates) as app:
        web = authority.issue("web", "DNS:web.internal")
        context = client_context(authority, web, ssl.TLSVersion.TLSv1_2)
        names, session, _ = resumed(app, context)
        assert names == ["web.internal"]
        assert resumed(app, context, session)[::2] == (["web.internal"], True)
        trusted.write_bytes(Authority(tmp_path / "other", "other").cert.read_bytes())
        refresh(certificates)
        with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
            resumed(app, context, session)
        assert len(app.requests) == 2


def test_authority_that_is_removed_is_no_longer_trusted(authority, files, tmp_path):
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    old, new = authority.issue("old", "DNS:old"), other.issue("new", "DNS:new")
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(authority.cert.read_bytes() + other.cert.read_bytes())
    certificates = Certificates(TLSFiles(files.cert, files.key, trusted))
    with serving(certificates=certificates) as app:
        assert ask(app, client_context(authority, old))[0] == ["old"]
        assert ask(app, client_context(authority, new))[0] == ["new"]
        trusted.write_bytes(other.cert.read_bytes())
        refresh(certificates)
        assert ask(app, client_context(authority, new))[0] == ["new"]
        with pytest.raises((ssl.SSLError, OSError)):
            ask(app, client_context(authority, old))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("no cert", r"the TLS certificate cannot be read: .*server\.pem: No such file"),
        ("no ca", r"the TLS certificate cannot be read: .*ca\.pem: No such file"),
        ("text", r"the certificate .*server\.pem cannot be used with the key .*server\.key: "),
        ("ca text", r"ca\.pem has no authority for client certificates"),
        ("encrypted", "is encrypted: store it without a passphrase"),
    ],
)
def test_bad_file_refuses_to_start_with_its_name(files, damage, complaint):
    if damage == "no cert":
        files.cert.unlink()
    elif damage == "no ca":
        files.client_ca.unlink()
    elif damage == "text":
        files.cert.write_text("hello")
    elif damage == "ca text":
        files.client_ca.write_text("hello")
    else:
        files.key.write_text(
            files.key.read_text()
            .replace("PRIVATE KEY", "EC PRIVATE KEY")
            .replace(
                "-----\n",
                "-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,000102030405060708090A0B0C0D0E0F\n\n",
                1,
            )
        )
    with pytest.raises(ConfigError, match=complaint):
        Certificates(files)


def test_only_dns_and_uri_names_count():
    alternatives = (("DNS", "a"), ("IP Address", "10.0.0.1"), ("email", "x@y"), ("URI", "spiffe://a"), ("DirName", "x"))
    assert names_in({"subjectAltName": alternatives}) == ("a", "spiffe://a")
    assert names_in({}) == names_in(None) == ()


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
@pytest.mark.parametrize("kind", ["fifo", "file of another user", "link of another user", "link of its owner"])
def test_file_that_another_user_chose_is_refused(files, tmp_path, which, kind):
    """A FIFO kept the server from starting, and a link let another user choose the certificate."""
    path = getattr(files, which)
    moved = path.rename(path.with_suffix(".real"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "file of another user":
        path.write_bytes(moved.read_bytes())
    else:
        path.symlink_to(moved)
    if "another user" in kind:
        if os.getuid() != 0:
            pytest.skip("needs root to act as a second user")
        os.lchown(path, 65533, 65533)
    if kind == "link of its owner":
        Certificates(files)
        return
    with pytest.raises(ConfigError, match=r"is not a regular file|belongs to user 65533|that user 65533 could change"):
        Certificates(files)
