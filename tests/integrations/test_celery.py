"""`singleton` of Celery without a worker: tasks run eagerly, or are sent to a broker in memory."""

import inspect
import pickle
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from celery import Celery, chain, states
from celery.exceptions import Retry

import leasehold
from leasehold import Client, ConfigError, LeaseLost, NotAcquired, Unavailable
from leasehold.integrations.celery import SingletonTask, client, singleton
from tests.support.client_fixtures import Bench, bench  # noqa: F401


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(leasehold=f"memory://{uuid.uuid4().hex}", task_default_queue=uuid.uuid4().hex)
    app.task = partial(app.task, shared=False)  # not known to the apps of other tests
    yield app
    client(app).close()
    app.close()


def messages(app: Celery) -> int:
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue]
        return queue(connection.default_channel).queue_declare(passive=False).message_count


@contextmanager
def busy(app: Celery, name: str, **options: str) -> Iterator[None]:
    """By `acquire`: a thread that is in a `with` of the name must not wait for it."""
    lease = client(app).lock(name, **options).acquire()
    yield
    lease.release()


def test_task_runs_under_the_lock_of_its_arguments(app) -> None:
    @app.task(bind=True)
    @singleton("import:{account_id}", ttl=20)
    def import_account(self, account_id, lease, rows=1):
        assert leasehold.current_lease() is lease is self.request.lease
        (holding,) = client(app).inspect()
        assert (holding.name, holding.token, holding.holder.purpose) == (
            "import:7",
            lease.token,
            f"task {self.request.id}",
        )
        assert lease.ttl == 20
        return rows

    @app.task
    @singleton("import:{account_id}")
    def export_account(account_id):
        return account_id

    assert import_account.apply((7,), {"rows": 3}).get() == 3
    assert export_account(7) == 7  # called without a message, it has no id
    assert client(app).inspect() == []


def test_coroutine_that_a_plain_task_returns_is_refused(app) -> None:
    async def later():
        pass

    @app.task
    @singleton("report")
    def report():
        return later()

    with pytest.raises(leasehold.ConfigError, match="report returned a coroutine"):
        report()


def test_worker_is_warned_of_an_engine_that_excludes_no_other_worker(app, caplog) -> None:
    client(app)
    assert "memory:// excludes no other worker" in caplog.text


def test_sent_arguments_are_checked_without_the_lease(app) -> None:
    @app.task
    @singleton("import:{account_id}")
    def import_account(account_id, lease):
        pass

    @app.task
    @singleton("import:{account_id}")
    def export_account(account_id):
        pass

    for task in (import_account, export_account):
        assert list(inspect.signature(task.run).parameters) == ["account_id"]
        with pytest.raises(TypeError):
            task.delay(1, 2)
        task.delay(1)
    assert messages(app) == 2


@pytest.mark.parametrize("on_busy", ["skip", "retry", "wait", "coalesce"])
def test_busy_task_does_not_run(app, on_busy) -> None:
    @app.task
    @singleton("report", on_busy=on_busy, **({} if on_busy in ("skip", "retry") else {"wait": 0.01}))
    def report():
        pytest.fail("ran")

    with busy(app, "report"):
        if on_busy == "skip":
            assert report.apply().get() is None
        else:  # run without a worker, a task cannot be sent again
            with pytest.raises(NotAcquired):
                report.apply(throw=True).get()
    assert client(app).inspect() == []


def test_retried_task_keeps_its_own_retries(app, monkeypatch) -> None:
    @app.task(bind=True)
    @singleton("report", on_busy="retry", retry_in="5s")
    def report(self, number):
        pytest.fail("ran")

    sent = {}
    monkeypatch.setattr(app, "send_task", lambda name, args, kwargs, **options: sent.update(options, args=args))
    report.push_request(
        id="a", args=(1,), kwargs={}, called_directly=False, retries=2, chain=["next"], headers={"h": 1}
    )
    with busy(app, "report"), pytest.raises(Retry) as retry:
        monkeypatch.setattr("celery.current_task", report)
        report.run(1)
    assert 4 <= sent["countdown"] == retry.value.when <= 6
    assert [sent[key] for key in ("task_id", "retries", "args", "chain", "headers")] == [
        "a", 2, (1,), ["next"], {"h": 1}
    ]  # fmt: skip


def test_second_task_is_not_sent_while_the_first_is_queued(app) -> None:
    @app.task(base=SingletonTask)
    @singleton("import:{account_id}", at="send", queued_ttl=60)
    def import_account(account_id):
        return account_id

    first = import_account.apply_async((7,), countdown=1000)
    assert import_account.delay(7).id == first.id
    assert import_account.delay(8).id != first.id
    assert messages(app) == 2
    left = {holding.name: holding.left for holding in client(app).inspect()}
    assert left["import:7#queued"] > 900  # it may start in 1000 s
    assert left["import:8#queued"] <= 60
    (import_account.s(7) | import_account.si(8)).apply_async()  # a chain that lost its first task would never end
    assert messages(app) == 3


def test_task_is_not_sent_while_another_one_runs(app) -> None:
    @app.task(base=SingletonTask)
    @singleton("import:{account_id}", at="send")
    def skips(account_id):
        pass

    @app.task(base=SingletonTask)
    @singleton("import:{account_id}", at="send", on_busy="coalesce")
    def coalesces(account_id):
        pass

    with busy(app, "import:7", purpose="task abc"):
        assert skips.delay(7).id == "abc"
        assert [holding.name for holding in client(app).inspect()] == ["import:7"]
        assert coalesces.delay(7).id != "abc"
    with busy(app, "import:8"):  # by a program that is no task
        assert skips.delay(8).state == states.IGNORED
    assert messages(app) == 1


def test_argument_cannot_take_the_place_of_another_task(app) -> None:
    """An account with such an id kept the tasks of account 7 from being sent: they got the result of its own."""

    @app.task(base=SingletonTask)
    @singleton("import:{account_id}", at="send")
    def import_account(account_id):
        pass

    with pytest.raises(ConfigError, match="cannot end in #queued"):
        import_account.delay("7#queued")
    with pytest.raises(ConfigError, match="cannot end in #queued"):
        import_account.apply(("7#queued",), throw=True)
    assert not client(app).inspect()


def test_failed_send_leaves_the_queue_free(app, monkeypatch) -> None:
    @app.task(base=SingletonTask)
    @singleton("report", at="send")
    def report():
        pass

    with monkeypatch.context() as broken, pytest.raises(OSError, match="broker"):
        broken.setattr(app, "send_task", lambda *_, **__: (_ for _ in ()).throw(OSError("the broker is down")))
        report.delay()
    assert client(app).inspect() == []
    assert report.delay().id
    assert messages(app) == 1


def test_lost_lease_fails_the_task(app) -> None:
    @app.task
    @singleton("report")
    def report(lease, check):
        client(app).break_lock("report", token=lease.token)
        lease.wait_lost(60)
        if check:
            leasehold.current_lease().check()
            pytest.fail("went on")

    for check in (True, False):
        with pytest.raises(LeaseLost):
            report.apply((check,), throw=True).get()


def test_silent_engine_fails_the_task_before_it_begins(app, bench) -> None:  # noqa: F811
    silent = bench.client()

    @app.task
    @singleton("report", client=silent)
    def report():
        pytest.fail("ran")

    @app.task(base=SingletonTask)
    @singleton("report", client=silent, at="send")
    def sent():
        pytest.fail("ran")

    bench.transport.silent = True
    with pytest.raises(Unavailable):
        report.apply(throw=True).get()
    sent.delay()
    sent.delay()
    assert messages(app) == 2  # sent all the same: the lock is acquired when a task starts


def test_error_of_an_engine_reaches_senders_that_do_not_use_it(app) -> None:
    """They have not imported that engine's own subclass of the error, and may have no driver for it."""
    with Client("redis://127.0.0.1:1") as refused:

        @app.task
        @singleton("report", client=refused)
        def report():
            pytest.fail("ran")

        with pytest.raises(Unavailable) as down:
            report.apply(throw=True).get()
    assert type(down.value) is Unavailable
    assert down.value.engine == "redis"
    assert type(down.value.__cause__) is not Unavailable  # the case above
    assert type(pickle.loads(pickle.dumps(down.value.__cause__))) is Unavailable


def test_singleton_refuses_what_it_cannot_keep(app) -> None:
    def task(account_id):
        pass

    with pytest.raises(ConfigError, match="on_busy must be one of skip, retry, wait, coalesce"):
        singleton("report", on_busy="drop")
    with pytest.raises(ConfigError, match='"send" with on_busy "skip" or "coalesce"'):
        singleton("report", on_busy="wait", at="send")
    with pytest.raises(ConfigError, match="uses 'user_id', which is not a parameter"):
        singleton("import:{user_id}")(task)
    with pytest.raises(TypeError, match="timeout"):
        singleton("import:{account_id}", timeout=3)(task)
    without_base = app.task(singleton("report", at="send")(task))
    with pytest.raises(ConfigError, match=r"@app.task\(base=SingletonTask\)"):
        without_base.apply((7,), throw=True).get()


def test_client_is_that_of_the_setting(app, monkeypatch) -> None:
    assert client(app) is client(app)
    app = Celery("other", set_as_current=False)  # in a Django project
    settings = SimpleNamespace(CELERY_LEASEHOLD={"url": "memory://", "namespace": "shop", "ttl": 7})
    app.config_from_object(settings, namespace="CELERY")
    with client(app) as configured:
        assert configured.lock("a").options.ttl == 7
    monkeypatch.setenv("LEASEHOLD_URL", "memory://environment")
    third = Celery("third", set_as_current=False)
    with client(third), Client("memory://environment") as same, busy(third, "a"):
        assert same.lock("a").locked()


def test_chain_goes_on_after_a_skipped_task(app) -> None:
    @app.task
    @singleton("{name}")
    def skip(name):
        return name

    @app.task
    def last(value):
        return ("last", value)

    with busy(app, "busy"):
        assert chain(skip.s("busy"), last.s()).apply().get() == ("last", None)
    assert chain(skip.s("free"), last.s()).apply().get() == ("last", "free")
