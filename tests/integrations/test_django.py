"""Django: locks in transactions, decorators, commands and system checks. (Servers: `test_django_servers.py`.)"""

import asyncio
import json
import threading
from tempfile import mkdtemp

import django
import pytest
from django.conf import settings
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.core.wsgi import get_wsgi_application
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import AsyncRequestFactory, RequestFactory, override_settings
from django.urls import path
from django.views import View

from leasehold import ConfigError, LeaseLost, NotAcquired, current_lease
from leasehold.wsgi import IdempotencyKey
from tests.support import probe_integrations

if not settings.configured:
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{mkdtemp()}/shop.db"}},
        INSTALLED_APPS=["django.contrib.contenttypes", "leasehold.integrations.django"],
        LEASEHOLD={"URL": "memory://django", "NAMESPACE": "shop"},
        SECRET_KEY="for tests",
        ROOT_URLCONF=[],
    )
    django.setup()

from leasehold.integrations.django import alock, async_client, client, lock, locked, locked_view


def holders(name: str = "") -> list[str]:
    return [holding.name for holding in client().inspect(name) if holding.state == "held"]


@pytest.fixture(autouse=True)
def all_released():
    yield
    assert holders() == []
    connection.close()


def test_lock_outside_of_a_transaction_is_released_at_its_end() -> None:
    with lock("stock:7") as lease:
        assert holders() == ["stock:7"]
        assert current_lease() is lease
    assert holders() == []


def test_lock_in_a_transaction_is_released_after_the_commit() -> None:
    with transaction.atomic():
        with lock("stock:7") as lease:
            assert current_lease() is lease
        with transaction.atomic(), lock("stock:8"):
            pass
        transaction.on_commit(lambda: seen.append(holders()))
        seen = []
        assert holders() == ["stock:7", "stock:8"]
        lease.check()
    assert seen == [[]]  # hooks run in the order of registration: these locks were given back first
    assert holders() == []


def test_lock_in_a_transaction_is_released_after_the_rollback() -> None:
    with pytest.raises(KeyError), transaction.atomic():
        with lock("stock:7"):
            pass
        assert holders() == ["stock:7"]
        raise KeyError
    assert holders() == []
    with transaction.atomic():
        with pytest.raises(KeyError), transaction.atomic(), lock("stock:8"):
            raise KeyError
        assert holders() == []  # what it protected was undone


def test_lock_in_a_transaction_is_released_before_a_hook_that_fails() -> None:
    """Django drops the hooks behind one that raises, and the traceback kept the lock for as long as itself."""

    def fail() -> None:
        raise RuntimeError("the mail server is down")

    try:
        with transaction.atomic():
            transaction.on_commit(fail)
            with lock("stock:7"):
                pass
    except RuntimeError:
        assert holders() == []
    else:
        pytest.fail("the hook did not run")


def test_lock_entered_again_in_its_transaction_gives_the_same_lease() -> None:
    with transaction.atomic():
        with lock("stock:7") as first:
            pass
        with lock("stock:7", wait=0) as second:
            assert second is first
    with lock("stock:7") as third:
        assert third is not first


def test_lost_lease_rolls_the_transaction_back() -> None:
    with pytest.raises(LeaseLost), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("create table lost (id integer)")
        with lock("stock:7") as lease:
            client().break_lock("stock:7", token=lease.token)
            deadline = threading.Event()
            lease.on_lost(lambda _: deadline.set())
            assert deadline.wait(60)
    assert "lost" not in connection.introspection.table_names()


def test_locked_function_takes_the_lock_of_its_arguments() -> None:
    @locked("user:{user_id}", wait=0)
    def rename(user_id, name, lease):
        return lease.name, holders()

    @locked("user:{user_id}", wait=0)
    async def rename_async(user_id, lease):
        return lease.name, current_lease() is lease

    assert rename(7, "Ada") == ("user:7", ["user:7"])
    assert asyncio.run(rename_async(8)) == ("user:8", True)
    with lock("user:7"), pytest.raises(NotAcquired):
        rename(7, "Ada")


def test_locked_function_must_not_return_a_coroutine() -> None:
    @locked("user:{user_id}")
    def hidden(user_id):
        return asyncio.sleep(0)

    with pytest.raises(ConfigError, match="hidden returned a coroutine"):
        hidden(7)


@locked_view("order:{order_id}", retry_after=2.5)
def pay(request, order_id):
    return HttpResponse(current_lease().name)


@locked_view("order:{order_id}", retry_after="4s")
async def pay_async(request, order_id):
    return HttpResponse(current_lease().name)


def test_async_view_of_a_class_runs_under_the_lock() -> None:
    class Pay(View):
        async def get(self, request, order_id):
            await asyncio.sleep(0)
            return HttpResponse(current_lease().name)

    view = locked_view("order:{order_id}")(Pay.as_view())
    answer = asyncio.run(view(AsyncRequestFactory().get("/"), order_id=7))
    assert answer.content == b"order:7"


def test_locked_function_is_skipped_or_raises_while_the_lock_is_busy() -> None:
    runs = []

    @locked("report", on_busy="skip")
    def skipped():
        runs.append("skipped")
        return 1

    @locked("report", on_busy="skip")
    async def skipped_async():
        runs.append("skipped_async")
        return 2

    @locked("report", on_busy="raise")
    def refused():
        runs.append("refused")

    @locked("report", on_busy="skip")
    def takes_another():
        with lock("other", wait=0):
            pass

    held = client().lock("report").acquire()
    assert skipped() is None
    assert asyncio.run(skipped_async()) is None
    with pytest.raises(NotAcquired):
        refused()
    held.release()
    assert runs == []
    assert (skipped(), asyncio.run(skipped_async())) == (1, 2)
    other = client().lock("other").acquire()
    with pytest.raises(NotAcquired):  # of another name: not a reason to skip
        takes_another()
    other.release()


def test_locked_view_answers_409_while_the_lock_is_busy() -> None:
    request = RequestFactory().post("/orders/7")
    assert pay(request, order_id=7).content == b"order:7"
    with lock("order:7"):
        answer = pay(request, 7)
    assert (answer.status_code, answer["Retry-After"]) == (409, "3")
    assert answer["Content-Type"] == "application/problem+json"
    assert json.loads(answer.content)["status"] == 409


def test_locked_async_view_answers_409_while_the_lock_is_busy() -> None:
    async def main():
        request = AsyncRequestFactory().post("/orders/7")
        async with alock("order:7"):
            busy = await pay_async(request, 7)
        return busy.status_code, busy["Retry-After"], (await pay_async(request, 7)).content

    assert asyncio.run(main()) == (409, "4", b"order:7")


def test_locked_view_answers_400_if_an_argument_gives_no_valid_name() -> None:
    for order_id in ("x" * 300, "a\0b", "\ud800"):
        answer = pay(RequestFactory().post("/orders/7"), order_id)
        assert (answer.status_code, answer["Content-Type"]) == (400, "application/problem+json")
        assert order_id not in answer.content.decode()
    assert asyncio.run(pay_async(AsyncRequestFactory().post("/orders/7"), "x" * 300)).status_code == 400


def test_event_loops_that_follow_each_other_share_one_client() -> None:
    async def name_client():
        async with alock("a"):
            return async_client()

    first, second = asyncio.run(name_client()), asyncio.run(name_client())
    assert first is second


def test_locked_view_answers_503_and_rolls_back_without_the_engine() -> None:
    with override_settings(LEASEHOLD={"URL": "redis://127.0.0.1:1", "CALL_TIMEOUT": 1}):
        with transaction.atomic():
            answer = pay(RequestFactory().post("/orders/7"), 7)
            assert transaction.get_rollback()  # a view that answers is committed otherwise
        client().close()
    assert (answer.status_code, answer["Retry-After"]) == (503, "3")


def order(request):
    ordered.append(request.body)
    return HttpResponse(f"order {len(ordered)}", status=201)


ordered: list[bytes] = []


def test_repeated_request_to_django_gets_the_first_answer() -> None:
    def post():
        environ = RequestFactory().post("/orders", b"{}", "application/json", HTTP_IDEMPOTENCY_KEY="k1").environ
        statuses = []
        answer = application(environ, lambda status, headers, exc_info=None: statuses.append(status))
        return statuses, b"".join(answer)

    with override_settings(ROOT_URLCONF=(path("orders", order),), ALLOWED_HOSTS=["*"]):
        application = IdempotencyKey(get_wsgi_application(), client())
        assert post() == post() == (["201 Created"], b"order 1")
    assert ordered == [b"{}"]


def test_command_lists_and_breaks_locks_of_the_settings(tmp_path, capsys) -> None:
    with override_settings(LEASEHOLD={"URL": f"sqlite://{tmp_path}/locks.db", "NAMESPACE": "shop"}):
        with pytest.raises(LeaseLost), lock("stock:7") as lease:
            call_command("leasehold", "ls")
            assert "stock:7" in capsys.readouterr().out
            call_command("leasehold", "break", "stock:7", "--token", str(lease.token), "--yes")
            lease.verify()
        client().close()
    with pytest.raises(SystemExit) as ended:
        call_command("leasehold", "no-such-command")
    assert ended.value.code == 64


def test_command_says_that_it_cannot_use_the_password_of_the_settings() -> None:
    """It asked the engine without one, and said that the engine denied access."""
    given = {"URL": "redis://127.0.0.1:1", "PASSWORD": lambda: "s3cr3t"}
    with override_settings(LEASEHOLD=given), pytest.raises(CommandError, match="password_file="):
        call_command("leasehold", "ls")


def test_command_migrate_waits_for_the_lock_of_migrations(monkeypatch, capsys) -> None:
    call_command("leasehold", "migrate", "--verbosity", "0")
    assert "django_content_type" in connection.introspection.table_names()
    monkeypatch.setattr(*probe_integrations.django_migrate_wait(), 0)
    for command in (["leasehold", "migrate"], ["leasehold_migrate"]):
        with client().lock("migrate"), pytest.raises(CommandError, match="migrate is held by"):
            call_command(*command)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"URL": "redis://localhost"}, []),
        ({"URL": "memory://"}, ["leasehold.W001"]),
        ({}, ["leasehold.W002"]),
        ({"URL": "oracle://localhost"}, ["leasehold.E001"]),
        ({"URI": "redis://localhost"}, ["leasehold.E001"]),
        ({"URL": "redis://localhost", "TTL": -1}, ["leasehold.E001"]),
    ],
)
def test_system_check_reports_bad_settings_and_private_engines(monkeypatch, given, found) -> None:
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    with override_settings(LEASEHOLD=given):
        messages = run_checks(tags=["leasehold"], include_deployment_checks=True)
        assert [message.id for message in messages] == found


def test_unknown_setting_is_refused_with_the_known_ones() -> None:
    with override_settings(LEASEHOLD={"url": "memory://"}), pytest.raises(ConfigError, match="'url': its keys are URL"):
        client()
