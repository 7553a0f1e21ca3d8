"""Who may do what on a ZooKeeper server: owners of nodes and of their parents, TLS, SASL."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.security import OPEN_ACL_UNSAFE, make_acl, make_digest_acl

from leasehold import Client, ConfigError, Unavailable
from leasehold.runtime.base import step
from leasehold.testing.servers.process import free_ports, scratch
from leasehold.testing.servers.zookeeper import Zookeeper
from leasehold.testing.suite import made
from leasehold.testing.zookeeper_rig import ZookeeperRig


def test_nodes_and_their_parents_belong_to_whoever_made_them(url, root, raw) -> None:
    ours = url.replace("://", "://web:secret@")
    with Client(ours) as client, client.lock("a") as lease:
        raw.add_auth("digest", "web:secret")
        line = f"{root}/lh1/:a"
        for path in (f"{root}/lh1", line, f"{line}/{raw.get_children(line)[0]}"):
            (acl,) = raw.get_acls(path)[0]
            assert (acl.id.scheme, acl.perms) == ("digest", 31), path
            assert acl.id.id.startswith("web:")
        with Client(url) as stranger:
            for call in (
                lambda: stranger.lock("a").acquire(wait=0),
                lambda: stranger.break_lock("a", token=lease.token),
                lambda: stranger.inspect(),
            ):
                with pytest.raises(ConfigError, match="does not permit"):
                    call()
        with Client(ours) as friend:
            assert friend.lock("a").try_acquire() is None
        lease.renew()


def test_the_least_that_must_be_permitted(url, root, raw) -> None:
    """As the guarantees page has it: an operator makes /lh1; users may create lines in it and read them, no more."""
    acl = [make_digest_acl("web", "secret", read=True, create=True), make_digest_acl("op", "x", all=True)]
    raw.create(root)
    raw.add_auth("digest", "op:x")
    raw.create(f"{root}/lh1", b"", acl=acl)
    raw.create(f"{root}/lh1/base", b"0", acl=[make_digest_acl("web", "secret", read=True), acl[1]])
    with Client(url.replace("://", "://web:secret@")) as one, Client(url.replace("://", "://web:secret@")) as two:
        with one.lock("a", ttl=60) as lease:
            assert two.lock("a").try_acquire() is None
            assert two.break_lock("a", token=lease.token)
        with two.semaphore("s", 2), one.semaphore("s", 2):
            pass
        with pytest.raises(ConfigError, match="does not permit"):
            step(one._desk._engine.rebase(10, one._desk.deadline() + 2))
    with Client(url) as stranger, pytest.raises(ConfigError, match="does not permit"):
        stranger.lock("b").acquire(wait=0)


def test_a_chroot_that_may_not_be_made_is_said(url, root, raw) -> None:
    raw.add_auth("digest", "op:x")
    raw.create(root, acl=[make_digest_acl("op", "x", all=True)])
    with Client(f"{url}/app/locks") as client, pytest.raises(ConfigError, match="does not permit"):
        client.lock("a").acquire(wait=0)


def test_a_right_taken_away_costs_what_it_must_and_no_more(url, root, raw, until) -> None:
    """While it may not delete, a release is owed; once it may again, it is done."""
    line = f"{root}/lh1/:a"
    with Client(url) as client:
        lease = client.lock("a", ttl=60).acquire()
        raw.set_acls(line, [make_acl("world", "anyone", read=True, write=True, create=True, admin=True)])
        lease.renew()
        assert not lease.release()
        assert client.inspect("a")
        raw.set_acls(line, OPEN_ACL_UNSAFE)
        until(lambda: not client.inspect("a"))


def test_an_acl_of_your_own(url, root, raw) -> None:
    with Client(f"{url}?acl=world:anyone:cdrw") as client, client.lock("a"):
        assert [acl.perms for acl in raw.get_acls(f"{root}/lh1/:a")[0]] == [15]


# -------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def papers(tmp_path_factory) -> Path:
    """An authority, a server, a client that it knows, and one that it does not."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("papers")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    def authority(name: str) -> None:
        subject = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2")
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject)

    def paper(name: str, by: str) -> None:
        (folder / "more").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", "csr")
        signed = ("-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-CAcreateserial", "-days", "2", "-extfile", "more")
        openssl("x509", "-req", "-in", "csr", "-out", f"{name}.crt", *signed)
        both = [(folder / f"{name}.{end}").read_text() for end in ("key", "crt")]
        (folder / f"{name}.pem").write_text("".join(both))

    for name in ("ca", "other"):
        authority(name)
    paper("server", "ca")
    paper("client", "ca")
    paper("stranger", "other")
    return folder


@pytest.fixture(scope="module")
def secure(papers) -> Iterator[str]:
    """The address of a server that speaks TLS alone, and asks who is there."""
    made(ZookeeperRig)
    plain, port = free_ports(2)
    settings = {
        "secureClientPort": port,
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.location": papers / "server.pem",
        "ssl.trustStore.location": papers / "ca.pem",
        "ssl.clientAuth": "need",
    }
    server = Zookeeper(scratch(), plain, settings).start()
    yield f"127.0.0.1:{port}"
    server.kill()


def test_tls_with_a_certificate_of_ones_own(secure, papers) -> None:
    ours = f"tls=yes&ca={papers}/ca.pem&cert={papers}/client.crt&key={papers}/client.key"
    with Client(f"zookeeper://{secure}/a?{ours}") as client:
        for _ in range(20):
            with client.lock("a") as lease:
                assert lease.held
        names = [f"n{number}" for number in range(300)]
        leases = [client.lock(name, ttl=60).acquire() for name in names]
        assert len(client.inspect()) == 300  # more than one record of TLS
        assert all(lease.release() for lease in leases)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("", "no answer"),
        ("tls=yes&ca={}/ca.pem", "no answer"),
        ("tls=yes&ca={}/ca.pem&cert={}/stranger.crt&key={}/stranger.key", "no answer"),
        ("tls=yes&ca={}/other.pem&cert={}/client.crt&key={}/client.key", "certificate verify failed"),
    ],
    ids=["no TLS", "no certificate", "a stranger's certificate", "a server of another authority"],
)
def test_tls_refused_is_unavailable_with_the_reason(secure, papers, options, why) -> None:
    with (
        Client(f"zookeeper://{secure}/a?{options.replace('{}', str(papers))}", call_timeout=1) as client,
        pytest.raises(Unavailable, match=why),
    ):
        client.lock("a").acquire(wait=0)


# ------------------------------------------------------------------- SASL


@pytest.fixture(scope="module")
def asking() -> Iterator[str]:
    """The address of a server that knows web by a password, through SASL."""
    pytest.importorskip("puresasl")
    made(ZookeeperRig)
    folder = scratch()
    jaas = Path(folder, "jaas.conf")
    module = "org.apache.zookeeper.server.auth.DigestLoginModule"
    jaas.write_text(f'Server {{ {module} required user_web="secret"; }};\n')
    provider = {"authProvider.1": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"}
    given = {"JAVA_TOOL_OPTIONS": f"-Djava.security.auth.login.config={jaas}"}
    server = Zookeeper(folder, free_ports(1)[0], provider, None, given).start()
    yield f"127.0.0.1:{server.port}"
    server.kill()


def test_sasl_by_password(asking) -> None:
    with (
        Client(f"zookeeper://web:secret@{asking}/a?sasl=DIGEST-MD5") as client,
        client.lock("a"),
        Client(f"zookeeper://{asking}/a") as stranger,
        pytest.raises(ConfigError, match="does not permit"),
    ):
        stranger.lock("a").acquire(wait=0)


def test_a_wrong_password_is_a_config_error_in_time(asking, caplog) -> None:
    with Client(f"zookeeper://web:hunter2@{asking}/a?sasl=DIGEST-MD5", call_timeout=3) as client:
        for _ in range(2):
            with pytest.raises(ConfigError, match="refused the credentials"):
                client.lock("a").acquire(wait=0)
    assert "hunter2" not in caplog.text
