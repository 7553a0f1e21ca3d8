"""Access control on a ZooKeeper server: ACLs of nodes and their parents, TLS, SASL."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.security import OPEN_ACL_UNSAFE, make_acl, make_digest_acl

from harness.rigs.zookeeper import ZookeeperRig
from harness.servers.folders import scratch
from harness.servers.process import free_ports
from harness.servers.zookeeper import Zookeeper
from leasehold import Client, ConfigError, LeaseLost, Unavailable
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import health, probe


def test_nodes_and_parents_belong_to_the_user_that_created_them(url, root, kazoo) -> None:
    own_url = url.replace("://", "://web:secret@")
    with Client(own_url) as client, client.lock("a") as lease:
        kazoo.add_auth("digest", "web:secret")
        queue_path = f"{root}/lh1/:a"
        for path in (f"{root}/lh1", queue_path, f"{queue_path}/{kazoo.get_children(queue_path)[0]}"):
            (acl,) = kazoo.get_acls(path)[0]
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
        with Client(own_url) as colleague:
            assert colleague.lock("a").try_acquire() is None
        lease.renew()


def test_documented_permissions_suffice(url, root, kazoo) -> None:
    """As in docs/guarantees/zookeeper.md: an operator creates /lh1; users may only create and read queues in it."""
    acl = [make_digest_acl("web", "secret", read=True, create=True), make_digest_acl("op", "x", all=True)]
    kazoo.create(root)
    kazoo.add_auth("digest", "op:x")
    kazoo.create(f"{root}/lh1", b"", acl=acl)
    kazoo.create(f"{root}/lh1/base", b"0", acl=[make_digest_acl("web", "secret", read=True), acl[1]])
    with Client(url.replace("://", "://web:secret@")) as one, Client(url.replace("://", "://web:secret@")) as two:
        with pytest.raises(LeaseLost), one.lock("a", ttl=60) as lease:
            assert two.lock("a").try_acquire() is None
            assert two.break_lock("a", token=lease.token)
        with two.semaphore("s", 2), one.semaphore("s", 2):
            pass
        assert one.once("k", lambda: 1) == two.once("k", lambda: 2) == 1
        with pytest.raises(ConfigError, match="does not permit"):
            run_sync(probe.engine(one).rebase(10, probe.core(one).deadline() + 2))
    with Client(url) as stranger, pytest.raises(ConfigError, match="does not permit"):
        stranger.lock("b").acquire(wait=0)


def test_chroot_that_cannot_be_created_is_a_config_error(url, root, kazoo) -> None:
    kazoo.add_auth("digest", "op:x")
    kazoo.create(root, acl=[make_digest_acl("op", "x", all=True)])
    with Client(f"{url}/app/locks") as client, pytest.raises(ConfigError, match="does not permit"):
        client.lock("a").acquire(wait=0)


def test_release_is_pending_while_delete_permission_is_revoked(url, root, kazoo, wait_until) -> None:
    """The watchdog retries the pending release until the client may delete again."""
    queue_path = f"{root}/lh1/:a"
    with Client(url) as client:
        lease = client.lock("a", ttl=60).acquire()
        kazoo.set_acls(queue_path, [make_acl("world", "anyone", read=True, write=True, create=True, admin=True)])
        lease.renew()
        assert not lease.release()
        assert client.inspect("a")
        kazoo.set_acls(queue_path, OPEN_ACL_UNSAFE)
        wait_until(lambda: not client.inspect("a"))


def test_acl_option_sets_the_acl_of_nodes(url, root, kazoo) -> None:
    with Client(f"{url}?acl=world:anyone:cdrw") as client, client.lock("a"):
        assert [acl.perms for acl in kazoo.get_acls(f"{root}/lh1/:a")[0]] == [15]


# -------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """A server and a client certificate of one authority, and a client certificate of another."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("papers")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    def create_authority(name: str) -> None:
        subject = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2")
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject)

    def issue_certificate(name: str, by: str) -> None:
        (folder / "more").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", "csr")
        signed = ("-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-CAcreateserial", "-days", "2", "-extfile", "more")
        openssl("x509", "-req", "-in", "csr", "-out", f"{name}.crt", *signed)
        key_and_certificate = [(folder / f"{name}.{end}").read_text() for end in ("key", "crt")]
        (folder / f"{name}.pem").write_text("".join(key_and_certificate))

    for name in ("ca", "other"):
        create_authority(name)
    issue_certificate("server", "ca")
    issue_certificate("client", "ca")
    issue_certificate("stranger", "other")
    return folder


@pytest.fixture(scope="module")
def tls_address(certificates) -> Iterator[str]:
    """The address of a server that accepts only TLS clients with a certificate."""
    rig_or_skip(ZookeeperRig)
    plain_port, port = free_ports(2)
    settings = {
        "secureClientPort": port,
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.location": certificates / "server.pem",
        "ssl.trustStore.location": certificates / "ca.pem",
        "ssl.clientAuth": "need",
    }
    server = Zookeeper(scratch(), plain_port, settings).start()
    yield f"127.0.0.1:{port}"
    server.kill()


@pytest.mark.extended  # a server of its own, and the keys for it
def test_tls_works_with_a_client_certificate(tls_address, certificates) -> None:
    tls_options = f"tls=yes&ca={certificates}/ca.pem&cert={certificates}/client.crt&key={certificates}/client.key"
    with Client(f"zookeeper://{tls_address}/a?{tls_options}", call_timeout=60) as client:
        for _ in range(20):
            with client.lock("a") as lease:
                assert lease.held
        names = [f"n{number}" for number in range(300)]
        leases = [client.lock(name, ttl=60).acquire() for name in names]
        assert len(client.inspect()) == 300  # more than one TLS record
        assert all(lease.release() for lease in leases)


_REFUSED = "cannot connect|did not answer"  # a server may also close the connection without a word


@pytest.mark.extended
def test_health_probe_uses_the_same_tls(tls_address, certificates) -> None:
    tls_options = f"tls=yes&ca={certificates}/ca.pem&cert={certificates}/client.crt&key={certificates}/client.key"
    assert health.probe(f"zookeeper://{tls_address}/a?{tls_options}").up
    assert not health.probe(f"zookeeper://{tls_address}/a?tls=yes&ca={certificates}/other.pem").up


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("", _REFUSED),
        ("tls=yes&ca={}/ca.pem", _REFUSED),
        ("tls=yes&ca={}/ca.pem&cert={}/stranger.crt&key={}/stranger.key", _REFUSED),
        ("tls=yes&ca={}/other.pem&cert={}/client.crt&key={}/client.key", "certificate verify failed"),
    ],
    ids=["no TLS", "no certificate", "a stranger's certificate", "a server of another authority"],
)
def test_refused_tls_is_unavailable_with_the_reason(tls_address, certificates, options, why) -> None:
    seconds = 1 if why == _REFUSED else 5  # for a handshake on a busy machine
    with (
        Client(
            f"zookeeper://{tls_address}/a?{options.replace('{}', str(certificates))}", call_timeout=seconds
        ) as client,
        pytest.raises(Unavailable, match=why),
    ):
        client.lock("a").acquire(wait=0)


# ------------------------------------------------------------------- SASL


@pytest.fixture(scope="module")
def sasl_address() -> Iterator[str]:
    """The address of a server where the user web authenticates with a password through SASL."""
    pytest.importorskip("puresasl")
    rig_or_skip(ZookeeperRig)
    folder = scratch()
    jaas = Path(folder, "jaas.conf")
    module = "org.apache.zookeeper.server.auth.DigestLoginModule"
    jaas.write_text(f'Server {{ {module} required user_web="secret"; }};\n')
    provider = {"authProvider.1": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"}
    environment = {"JAVA_TOOL_OPTIONS": f"-Djava.security.auth.login.config={jaas}"}
    server = Zookeeper(folder, free_ports(1)[0], provider, None, environment).start()
    yield f"127.0.0.1:{server.port}"
    server.kill()


def test_sasl_password_authenticates_the_client(sasl_address) -> None:
    with (
        Client(f"zookeeper://web:secret@{sasl_address}/a?sasl=DIGEST-MD5") as client,
        client.lock("a"),
        Client(f"zookeeper://{sasl_address}/a") as stranger,
        pytest.raises(ConfigError, match="does not permit"),
    ):
        stranger.lock("a").acquire(wait=0)


def test_wrong_sasl_password_is_a_config_error_in_time(sasl_address, caplog) -> None:
    with Client(f"zookeeper://web:hunter2@{sasl_address}/a?sasl=DIGEST-MD5") as client:
        for _ in range(2):
            with pytest.raises(ConfigError, match="refused the credentials"):
                client.lock("a").acquire(wait=0)
    assert "hunter2" not in caplog.text
