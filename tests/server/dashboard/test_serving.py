"""The dashboard of a real server: how it ends with open tabs, and how soon the demo is full."""

import contextlib
import re
import signal
import time

import pytest

from leasehold.server.dashboard.routes import PAGES
from tests.support.dashboard import Page
from tests.support.running_server import RunningServer, poll, running
from tests.support.timing import check_elapsed

pytestmark = pytest.mark.extended


def test_server_with_ten_open_tabs_ends_at_once():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running())
        keys = [page.key for page in PAGES.values()]
        tabs = [stack.enter_context(server.stream(f"/ui/stream?page={keys[i % len(keys)]}")) for i in range(10)]
        for tab in tabs:
            tab.wait_for("event: frame")
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        check_elapsed(began, 2.0)
        assert all("event: drain" in tab.read_to_end() for tab in tabs)


def test_demo_fills_every_page_within_ten_seconds():
    began = time.monotonic()
    server = RunningServer("--demo", url=None)
    try:

        def is_full():
            page = Page(server.get("/").body.decode())
            held = re.search(r"([\d,]+) locks are held, ([\d,]+) callers wait", page.ids["lede"])
            return held and int(held[1]) > 5 and int(held[2]) > 5 and page.ids["warnings"] and page.ids["feed"]

        poll(is_full)
        check_elapsed(began, 10.0)
        lock = Page(server.get("/lock?namespace=shop&name=orders/settlement").body.decode())
        assert "The fence refuses a write" in lock.ids["timeline"]
        assert "settler-3" in lock.ids["grants"]
        for path in PAGES:
            assert server.get(path).status == 200
    finally:
        assert server.stop() == 0
    assert "ERROR" not in server.output
