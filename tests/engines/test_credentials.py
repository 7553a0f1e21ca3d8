"""Passwords that change while a client runs, on real servers, and connection pools as a source of settings."""

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import ssl
import subprocess
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import psycopg_pool
import pytest
import redis
import sqlalchemy

from harness.rigs import mysql, postgresql
from harness.rigs.redis import single_server
from harness.rigs.redlock import five_nodes
from harness.servers.etcd import Cluster
from harness.servers.postgresql import PostgreSQL
from leasehold import AsyncClient, Client, ConfigError, Unavailable
from leasehold.credentials import Password
from leasehold.pools import settings_of
from tests.support import health, probe, probe_mysql
from tests.support.running_server import poll
from tests.support.timing import check_elapsed

extended = pytest.mark.extended


class RedisUser:
    """A user whose password can be changed; `change` also ends the user's connections."""

    def __init__(self, servers, scheme: str) -> None:
        self.name, self._servers = f"u{uuid.uuid4().hex}", servers
        self.url = f"{scheme}://{self.name}@" + ",".join(f"127.0.0.1:{server.port}" for server in servers)

    def change(self, password: str) -> None:
        for server in self._servers:
            server.ask("ACL", "SETUSER", self.name, "on", "resetpass", f">{password}", "~*", "&*", "+@all")
            server.ask("CLIENT", "KILL", "USER", self.name)

    def remove(self) -> None:
        for server in self._servers:
            server.ask("ACL", "DELUSER", self.name)


class MysqlUser:
    def __init__(self) -> None:
        self._server, self.name = mysql.server(), f"u{uuid.uuid4().hex[:12]}"
        self._server.ask(f"create user {self.name}@'%'")
        self._server.ask(f"create database {self.name}")
        self._server.ask(f"grant all on {self.name}.* to {self.name}@'%'")
        self._server.ask(f"grant process on *.* to {self.name}@'%'")
        self.url = f"mysql://{self.name}@127.0.0.1:{self._server.port}/{self.name}"

    def change(self, password: str) -> None:
        self._server.ask(f"alter user {self.name}@'%' identified by '{password}'")
        with contextlib.suppress(Exception):  # there is no connection yet
            self._server.ask(f"kill user {self.name}")

    def remove(self) -> None:
        self._server.ask(f"drop user {self.name}@'%'")
        self._server.ask(f"drop database {self.name}")


class PostgresqlUser:
    def __init__(self, folder) -> None:
        rules = folder / "hba.conf"
        rules.write_text("host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
        for path in (rules, folder, *folder.parents[:-2]):
            path.chmod(0o755)  # the server runs as another user
        self._server = PostgreSQL(f"hba_file={rules}").start()
        self._server.ask("create role app login")
        self._server.ask("create database locks owner app")
        self.url = self._server.url("locks", "app")

    def change(self, password: str) -> None:
        self._server.ask(f"alter role app password '{password}'")
        self._server.ask("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'")

    def remove(self) -> None:
        self._server.kill()


class EtcdUser:
    """etcd forgets the tokens of a user whose password changes."""

    def __init__(self) -> None:
        self._cluster = Cluster(1).start()
        self._known, self._port = False, self._cluster.members[0].port
        self.url = f"etcd://app@127.0.0.1:{self._port}"

    def _etcdctl(self, *arguments: str, given: str = "") -> None:
        credentials = ("--user", "root:top") if self._known else ()
        command = ["etcdctl", "--endpoints", f"127.0.0.1:{self._port}", *credentials, *arguments]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        subprocess.run(command, input=given, text=True, check=True, env=environment, capture_output=True)

    def change(self, password: str) -> None:
        if self._known:
            self._etcdctl("user", "passwd", "app", "--interactive=false", given=password)
            return
        for name, its_password in (("root", "top"), ("app", password)):
            self._etcdctl("user", "add", f"{name}:{its_password}")
            self._etcdctl("user", "grant-role", name, "root")
        self._etcdctl("auth", "enable")
        self._known = True

    def remove(self) -> None:
        self._cluster.kill()


USERS = {
    "redis": lambda folder: RedisUser(single_server(), "redis"),
    "redlock": lambda folder: RedisUser(five_nodes(), "redlock"),
    "mysql": lambda folder: MysqlUser(),
    "postgresql": PostgresqlUser,
    "etcd": lambda folder: EtcdUser(),
}


@pytest.fixture(params=["redis", *(pytest.param(name, marks=extended) for name in USERS if name != "redis")])
def user(request, tmp_path):
    user = USERS[request.param](tmp_path)
    yield user
    user.remove()


def write(path, text: str) -> None:
    """Replaced in one step, as secret stores do it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)


def attempt_until_granted(lock) -> None:
    """A call may meet the connection that was ended."""

    def granted() -> bool:
        try:
            lock.acquire().release()
        except (Unavailable, ConfigError):  # ConfigError: of a connection opened before the file was replaced
            return False
        return True

    poll(granted)


def test_password_of_a_file_is_read_for_every_new_connection(user, tmp_path) -> None:
    file = tmp_path / "password"
    write(file, "first\n")
    user.change("first")
    with Client(f"{user.url}?password_file={file}", namespace=uuid.uuid4().hex, ttl=20, call_timeout=30) as client:
        lease = client.lock("kept").acquire()
        write(file, "second\n")
        user.change("second")
        attempt_until_granted(client.lock("other", wait=0))
        lease.verify()  # by the watchdog's connection or the caller's, either is new
        assert lease.release()
    with Client(f"{user.url}?password_file={file}", namespace=uuid.uuid4().hex, call_timeout=2) as client:
        attempt_until_granted(client.lock("other", wait=0))
        write(file, "third\n")  # the server does not know this one
        user.change("fourth")
        with pytest.raises((ConfigError, Unavailable)) as refused:
            client.lock("other", wait=0).acquire()
        assert not any(word in f"{refused.value!r} {client!r}" for word in ("second", "third", "fourth"))


def test_health_probe_signs_in_with_the_password_of_a_file(user, tmp_path) -> None:
    file = tmp_path / "password"
    write(file, "first\n")
    user.change("first")
    assert health.probe(f"{user.url}?password_file={file}").error is None


def test_password_of_a_function_is_read_under_asyncio(user) -> None:
    passwords = ["first"]

    async def main() -> None:
        url, namespace = user.url, uuid.uuid4().hex
        async with AsyncClient(url, namespace=namespace, call_timeout=30, password=lambda: passwords[-1]) as client:
            async with client.lock("a"):
                passwords.append("second")
                await asyncio.to_thread(user.change, "second")
            for _ in range(100):
                try:
                    async with client.lock("b", wait=0):
                        return
                except (Unavailable, ConfigError):
                    await asyncio.sleep(0.1)  # pause: the connection that was ended
            pytest.fail("not granted again")

    user.change("first")
    asyncio.run(main())


# ------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("url", "password", "text"),
    [
        ("memory://", "x", "memory:// has no password"),
        ("sqlite:///x.db", lambda: "x", "sqlite:// has no password"),
        ("redis://:x@localhost", "y", "has a password"),
        ("postgresql://u:x@localhost/d", "y", "has a password"),
        ("mysql://u:x@localhost/d", lambda: "y", "has a password"),
        ("etcd://u:x@localhost", "y", "has a password"),
        ("etcd://localhost", "y", "both user and password"),
        ("zookeeper://u:x@localhost", "y", "has a password"),
        ("redlock://:x@a,b,c", "y", "has a password"),
        ("redis://localhost?password_file=/nowhere/at/all", None, "cannot be read"),
        ("redis://localhost", 7, "password= must be a text or a function"),
        ("redis://localhost", "a\udcffb", "password= must be a text of at most"),
        ("http://localhost?password_file=x", None, "known options: api_key_file"),
    ],
)
def test_password_that_does_not_fit_the_url_is_refused(url, password, text) -> None:
    with pytest.raises(ConfigError, match=text):
        Client(url, password=password)


def test_password_file_and_password_together_are_refused(tmp_path) -> None:
    file = tmp_path / "password"
    write(file, "secret")
    with pytest.raises(ConfigError, match="give either that or password="):
        Client(f"redis://localhost?password_file={file}", password="x")
    write(file, "\n")
    with pytest.raises(ConfigError, match="is empty"):
        Client(f"redis://localhost?password_file={file}")


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (lambda: 1 / 0, Unavailable, "password= raised ZeroDivisionError"),
        (lambda: None, ConfigError, "must return a text"),
        (lambda: "a\0b", ConfigError, "must return a text"),
        (lambda: "a\udcffb", ConfigError, "must return a text"),
    ],
)
def test_function_that_gives_no_password_fails_the_call(source: Callable[[], str], error, text) -> None:
    with pytest.raises(error, match=text):
        Password(source, "password=").read()
    (server,) = single_server()
    with Client(f"redis://127.0.0.1:{server.port}", password=source) as client, pytest.raises(error, match=text):
        client.lock("a", wait=0).acquire()


@pytest.mark.parametrize(("source", "error"), [(lambda: 1 / 0, Unavailable), (lambda: "a\0b", ConfigError)])
def test_function_that_gives_no_password_is_not_blamed_on_mysql(mysql, source: Callable[[], str], error) -> None:
    with Client(mysql.url(), password=source) as client, pytest.raises(error, match=r"^password= "):
        client.lock("a", wait=0).acquire()


@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError])
def test_function_that_exits_does_not_end_the_thread_that_renews(raised) -> None:
    user, granted, lost = RedisUser(single_server(), "redis"), threading.Event(), threading.Event()
    user.change("opensesame")

    def source() -> str:
        if not granted.is_set():
            return "opensesame"
        raise raised

    with Client(user.url, password=source, ttl=0.5) as client:
        lease = client.lock(uuid.uuid4().hex, wait=0).acquire()
        granted.set()
        user.change("opensesame")  # ends all connections
        lease.on_lost(lambda _: lost.set())
        assert lost.wait(30), "nothing reported the loss"
    user.remove()


def test_text_of_the_error_of_a_function_is_not_printed() -> None:
    def source() -> str:
        raise ValueError("the password is opensesame")

    with pytest.raises(Unavailable) as caught:
        Password(source, "password=").read()
    assert "opensesame" not in "".join(traceback.format_exception(caught.value))


# ---------------------------------------------------------------------------------- pools


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


def test_client_of_redis_py_gives_its_settings(namespace) -> None:
    user = RedisUser(single_server(), "redis")
    user.change("secret")
    (server,) = single_server()
    try:
        pool = redis.Redis(port=server.port, username=user.name, password="secret", db=3, decode_responses=True)
        with Client(pool, namespace=namespace) as client:
            pool.close()
            with client.lock("a"), pickle.loads(pickle.dumps(client)) as copy:
                assert copy.lock("a").try_acquire() is None
            assert "secret" not in repr(client)
        assert settings_of(redis.asyncio.Redis(port=7)).url == "redis://localhost:7/0"
    finally:
        user.remove()


def test_credential_provider_of_redis_py_is_called_for_new_connections(namespace) -> None:
    user = RedisUser(single_server(), "redis")
    (server,) = single_server()
    passwords = ["first"]

    class Provider(redis.CredentialProvider):
        def get_credentials(self):
            return user.name, passwords[-1]

    user.change("first")
    try:
        with Client(redis.Redis(port=server.port, credential_provider=Provider()), namespace=namespace) as client:
            client.lock("a").acquire().release()
            passwords.append("second")
            user.change("second")
            attempt_until_granted(client.lock("a", wait=0))
    finally:
        user.remove()


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
def test_function_that_does_not_return_costs_a_task_no_more_than_its_call(scheme) -> None:
    """The server is never asked: its password is not known."""
    gate = threading.Event()

    def password() -> str:
        gate.wait(60)
        return "late"

    async def run(port: int) -> None:
        async with AsyncClient(f"{scheme}://u@127.0.0.1:{port}/", password=password, call_timeout=0.3) as client:
            began = time.monotonic()
            with pytest.raises(Unavailable, match="did not return in time"):
                await client.lock("a").acquire(wait=0)
            check_elapsed(began, 1.5)
            password_ = Password(password, "password=")
            calls = [password_.read_with(probe.runtime(client), probe.runtime(client).now() + 0.2) for _ in range(33)]
            errors = [str(error) for error in await asyncio.gather(*calls, return_exceptions=True)]
            assert "has not returned from 32 earlier calls" in errors[32]
            gate.set()

    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            asyncio.run(run(server.getsockname()[1]))
    finally:
        gate.set()


@pytest.mark.parametrize("scheme", ["redis", "postgresql", "mysql", "etcd"])
def test_password_function_that_hangs_costs_a_thread_only_its_call(scheme) -> None:
    gate = threading.Event()

    def password() -> str:
        gate.wait(120)
        return "late"

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"{scheme}://u@127.0.0.1:{server.getsockname()[1]}/"
        with Client(url, password=password, call_timeout=0.3) as client:
            with pytest.raises(Unavailable):
                client.lock("a").acquire(wait=0)
            assert not gate.is_set()
    gate.set()


def test_function_that_does_not_return_delays_no_report_of_a_loss() -> None:
    user, granted, gate, lost = RedisUser(single_server(), "redis"), *(threading.Event() for _ in range(3))
    user.change("opensesame")

    def password() -> str:
        if granted.is_set():
            gate.wait(120)
        return "opensesame"

    with Client(user.url, password=password, ttl=1, call_timeout=1) as client:
        lease = client.lock(uuid.uuid4().hex, wait=0).acquire()
        granted.set()
        user.change("opensesame")  # ends all connections
        lease.on_lost(lambda _: lost.set())
        assert lost.wait(60), "nothing reported the loss while the function had not returned"
    gate.set()
    user.remove()


def test_many_threads_may_ask_a_slow_function_at_once() -> None:
    user, granted = RedisUser(single_server(), "redis"), list[bool]()
    user.change("opensesame")

    def password() -> str:
        time.sleep(0.05)  # pause: a service that takes its time
        return "opensesame"

    with Client(user.url, password=password, call_timeout=60) as client:
        name = uuid.uuid4().hex
        tasks = [lambda n=n: granted.append(client.lock(f"{name}/{n}", wait=0).acquire().release()) for n in range(70)]
        threads = [threading.Thread(target=task) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert granted == [True] * 70
    user.remove()


def test_pool_of_psycopg_gives_its_settings(namespace) -> None:
    server = postgresql.server()
    pool = psycopg_pool.ConnectionPool(
        f"host=127.0.0.1 port={server.port} user=postgres",
        kwargs={"dbname": "postgres", "autocommit": True},
        open=False,
    )
    url, password = settings_of(pool)
    assert (url, password) == (f"postgresql://postgres@127.0.0.1:{server.port}/postgres", None)
    with Client(pool, namespace=namespace) as client, client.lock("a") as lease:
        assert lease.held


def test_psycopg_pool_that_libpq_cannot_parse_is_refused_without_its_text() -> None:
    pool = psycopg_pool.ConnectionPool("host=a password=hunter2 hunter3", open=False)
    with pytest.raises(ConfigError, match="cannot be parsed") as refused:
        settings_of(pool)
    assert "hunter" not in repr(refused.value)
    assert refused.value.__cause__ is None


def test_engine_of_sqlalchemy_gives_its_settings_and_fresh_passwords() -> None:
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://app:old@db.example:5433/shop", connect_args={"sslmode": "require"}
    )
    expected = "postgresql://app@db.example:5433/shop?sslmode=require"
    assert settings_of(engine) == (expected, "old")
    tokens = ["one"]

    @sqlalchemy.event.listens_for(engine, "do_connect")
    def provide(dialect, record, args, arguments):
        arguments["password"] = tokens[-1]

    url, password = settings_of(engine)
    assert url == expected
    assert password() == "one"
    tokens.append("two")
    assert password() == "two"
    my_engine = sqlalchemy.create_engine("mysql+pymysql://app:p%40w@localhost/shop?charset=utf8mb4")
    assert settings_of(my_engine) == ("mysql://app@localhost/shop", "p@w")
    assert probe.client_options(Client(my_engine)).url == "mysql://app@localhost/shop"


def test_sqlalchemy_engine_connects_undisturbed_while_passwords_are_read() -> None:
    engine = sqlalchemy.create_engine("postgresql+psycopg://app@127.0.0.1:1/locks", poolclass=sqlalchemy.NullPool)
    inside, may_go_on = threading.Event(), threading.Event()

    @sqlalchemy.event.listens_for(engine, "do_connect")
    def put_token_in(_dialect, _record, _arguments, options) -> None:
        options["password"] = "token"
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            may_go_on.wait(30)

    read_password = settings_of(engine).password
    assert callable(read_password)
    errors = []

    def connect() -> None:
        try:
            engine.connect()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    assert inside.wait(30)
    assert read_password() == "token"
    may_go_on.set()
    thread.join(30)
    assert [type(error) for error in errors] == [sqlalchemy.exc.OperationalError]  # nothing listens on port 1


def test_log_of_sqlalchemy_shows_no_password(caplog) -> None:
    caplog.set_level(logging.DEBUG, "sqlalchemy.pool")
    engine = sqlalchemy.create_engine("postgresql+psycopg://app:opensesame@127.0.0.1:1/locks")
    settings = settings_of(engine)
    assert settings.password == "opensesame"
    assert "Pool recreating" in caplog.text
    assert "opensesame" not in caplog.text + repr(settings)


class TunnelledConnection(redis.Connection):
    """Another program's way to its server: without it, the password would go to another host or in clear text."""


class OwnConnection(psycopg.Connection[Any]):
    @classmethod
    def connect(cls, *arguments: Any, **named: Any) -> Any:
        raise AssertionError("never called")


class FailingProvider(redis.CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        raise RuntimeError("opensesame is not the token")


@pytest.mark.parametrize(
    ("pool", "text"),
    [
        (object(), "not an object of type object"),
        (7, "not an object of type int"),
        (redis.Redis(ssl=True, ssl_ciphers="AES"), "has the setting 'ssl_ciphers'"),
        (redis.Sentinel([("localhost", 1)]).master_for("x"), r"redis\+sentinel://"),
        (redis.ConnectionPool(connection_class=TunnelledConnection), "'connection_class'"),
        (redis.Redis(redis_connect_func=lambda connection: None), "'redis_connect_func'"),
        (psycopg_pool.ConnectionPool("", open=False, connection_class=OwnConnection), "'connection_class'"),
        (sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: None), "creator="),
        (sqlalchemy.create_engine("sqlite://"), "not 'sqlite'"),
        (sqlalchemy.create_engine("mysql+pymysql://h/d", connect_args={"ssl": {"ca": "x"}}), "has the setting 'ssl'"),
    ],
)
def test_pool_whose_settings_cannot_be_kept_is_refused(pool, text) -> None:
    with pytest.raises(ConfigError, match=text):
        Client(pool)


def test_classes_of_the_libraries_themselves_are_accepted() -> None:
    row_type = psycopg.Connection[dict[str, Any]]
    pool = psycopg_pool.ConnectionPool("host=127.0.0.1", open=False, connection_class=row_type)
    assert settings_of(pool).url == "postgresql://127.0.0.1/"
    tls = redis.ConnectionPool(connection_class=redis.SSLConnection, host="127.0.0.1")
    assert settings_of(tls).url.startswith("rediss://127.0.0.1:6379/0")


def test_provider_that_fails_is_refused_without_its_text() -> None:
    with pytest.raises(ConfigError, match="raised RuntimeError") as refused:
        Client(redis.Redis(credential_provider=FailingProvider()))
    assert "opensesame" not in "".join(traceback.format_exception(refused.value))


def use_redis(cert: str) -> None:
    Client(f"rediss://127.0.0.1:1?ssl_certfile={cert}&ssl_keyfile={cert}")


def use_sentinels(cert: str) -> None:
    Client(f"redis+sentinel://127.0.0.1:1/locks?tls=yes&ssl_certfile={cert}&ssl_keyfile={cert}")


def use_mysql(cert: str) -> None:
    probe_mysql.make_ssl_context({"cert": cert, "key": cert})


def use_zookeeper(cert: str) -> None:
    from leasehold.engines.zookeeper.connection import wrap_tls

    tls = {"ca": None, "certfile": cert, "keyfile": cert, "keyfile_password": None}
    with socket.socket() as sock:
        wrap_tls(sock, "localhost", check_hostname=False, verify_certs=False, **tls)


@pytest.mark.parametrize("use", [use_redis, use_sentinels, use_mysql, use_zookeeper])
def test_encrypted_private_key_is_refused_without_a_prompt(use, monkeypatch) -> None:
    """Without a passphrase, OpenSSL asks for it on the terminal, and waits for ever."""
    passphrases = []

    def load_cert_chain(_context: ssl.SSLContext, _cert: str, keyfile: str, password: Any = None) -> None:
        passphrases.append(password)
        raise OSError("the files are not read here")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_cert_chain)
    with contextlib.suppress(OSError, ConfigError):
        use("cert.pem")
    assert passphrases
    assert None not in passphrases
