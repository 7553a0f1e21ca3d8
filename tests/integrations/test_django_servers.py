"""A Django project with two server processes, WSGI and ASGI: one holder at a time, also after one was killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from harness.servers.process import free_ports
from tests.support.client_fixtures import poll_until
from tests.support.paths import child_environment

pytestmark = pytest.mark.extended

PROJECT = """
import asyncio, os, sys, time
import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.db import connection, transaction
from django.http import HttpResponse
from django.urls import path

settings.configure(
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}},
    INSTALLED_APPS=["leasehold.integrations.django"],
    LEASEHOLD={"TTL": 6, "NAMESPACE": os.environ["LEASEHOLD_NAMESPACE"]},  # and $LEASEHOLD_URL
)
django.setup()

from leasehold.integrations.django import lock, locked_view

def note(text):
    with open("log", "a") as file:
        file.write(f"{text} {os.getpid()}\\n")

def take(request):  # reads, thinks and writes: loses updates without the lock
    with transaction.atomic(), lock("stock", wait=120), connection.cursor() as cursor:
        cursor.execute("select quantity from stock")
        quantity = cursor.fetchone()[0]
        time.sleep(0.01)
        cursor.execute("update stock set quantity = %s", [quantity - 1])
    note("took")
    return HttpResponse(str(quantity))

@locked_view("job", wait=120)
async def work(request):
    note("in")
    await asyncio.sleep(0.01)
    note("out")
    return HttpResponse("")

@locked_view("job", wait=120)
def hang(request):
    note("hangs")
    time.sleep(3600)

urlpatterns = [path("take", take), path("work", work), path("hang", hang)]
asgi, wsgi = get_asgi_application(), get_wsgi_application()

if __name__ == "__main__":
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

    class Threaded(ThreadingMixIn, WSGIServer):
        daemon_threads = True

    make_server("127.0.0.1", int(sys.argv[1]), wsgi, Threaded, WSGIRequestHandler).serve_forever()
"""


class Servers:
    """Two processes that serve one project, each at a port of its own."""

    def __init__(self, folder: Path, kind: str, variables: dict[str, str]) -> None:
        (folder / "project.py").write_text(PROJECT)
        self.folder, self._ports = folder, free_ports(2)
        programs = {"wsgi": ["project.py"], "asgi": ["-m", "uvicorn", "project:asgi", "--lifespan", "off", "--port"]}
        self._processes = [
            subprocess.Popen(
                [sys.executable, *programs[kind], str(port)],
                cwd=folder,
                env=child_environment(**variables),
                stderr=subprocess.DEVNULL,
            )
            for port in self._ports
        ]

    def get(self, number: int, page: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self._ports[number % 2]}/{page}", timeout=120)

    def answers(self) -> bool:
        try:
            return all(self.get(number, "none").status_code == 404 for number in range(2))
        except httpx.TransportError:
            return False

    def notes(self) -> list[tuple[str, int]]:
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(text, int(pid)) for text, pid in map(str.split, lines)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(60)


@pytest.fixture(params=["wsgi", "asgi"])
def servers(request, tmp_path, engine_variables) -> Iterator[Servers]:
    import sqlite3

    with sqlite3.connect(tmp_path / "shop.db") as database:
        database.execute("create table stock (quantity integer)")
        database.execute("insert into stock values (1000)")
    database.close()
    servers = Servers(tmp_path, request.param, engine_variables)
    try:
        poll_until(servers.answers, 240)
        yield servers
    finally:
        servers.stop()


def test_two_django_servers_share_a_lock_and_survive_a_killed_holder(servers) -> None:
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda number: int(servers.get(number, "take").text), range(24)))
        assert sorted(taken) == list(range(977, 1001))  # no update was lost
        worked = list(threads.map(lambda number: servers.get(number, "work").status_code, range(16)))
        assert worked == [200] * 16
        notes = [note for note in servers.notes() if note[0] in ("in", "out")]
        assert all(notes[n][0] == "in" and notes[n + 1] == ("out", notes[n][1]) for n in range(0, len(notes), 2))
        assert len({pid for _, pid in notes}) == 2

        hanging = threads.submit(servers.get, 0, "hang")
        poll_until(lambda: servers.notes()[-1][0] == "hangs", 60)
        os.kill(servers.notes()[-1][1], signal.SIGKILL)
        assert servers.get(1, "work").status_code == 200  # after the ttl
        with pytest.raises(httpx.TransportError):
            hanging.result(60)
