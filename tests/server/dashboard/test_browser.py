"""The dashboard in a real browser, over real engines: policy, accessibility, widths, themes, live parts, keys, Break.

Pictures of every page are written to the folder of LEASEHOLD_PICTURES, if that is set."""

import contextlib
import os
import re
import threading
import uuid
from pathlib import Path

import axe_playwright_python
import pytest
from playwright.sync_api import expect

from leasehold.server.dashboard import words
from leasehold.server.dashboard.routes import PAGES
from tests.support.browser import launch_chromium
from tests.support.dashboard import new_key
from tests.support.running_server import SECONDS, poll, running

pytestmark = pytest.mark.extended

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
NAMESPACE = f"shop-{uuid.uuid4().hex[:8]}"  # engines are shared, also with other processes of this run
HOSTILE = '<img src=x onerror="alert(1)">\u202egpj'
LONG = "tenant/" + "é" * 124
HOME, LOCKS = f"/?namespace={NAMESPACE}", f"/locks?namespace={NAMESPACE}"
LOCK = f"/lock?namespace={NAMESPACE}&name=orders/settlement"
PATHS = {
    **{page.key: f"{path}?namespace={NAMESPACE}" for path, page in PAGES.items()},
    "lock": LOCK,
    "long": f"/lock?namespace={NAMESPACE}&name={LONG}",
}
WIDTHS = (1440, 390, 320)


@pytest.fixture(scope="module", params=["redis", "etcd"])
def server(request, tmp_path_factory):
    """A server with an audit log and --admin, and some callers."""
    if request.param == "redis":
        from harness.rigs.redis import single_server

        url = f"redis://127.0.0.1:{single_server()[0].port}"
    else:
        from harness.rigs.etcd import single_member_cluster

        url = f"etcd://{single_member_cluster().hosts}"
    log = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    with running("--admin", "--audit-file", str(log), url=url) as server:
        server.engine = request.param
        leases = fill(server)
        ended = threading.Event()
        waiter = threading.Thread(target=wait_again_and_again, args=(server, ended))
        waiter.start()
        yield server
        ended.set()
        for name, lease in leases:  # the engine is shared with other tests
            release(server, name, lease)
        waiter.join(SECONDS)


def wait_again_and_again(server, ended):
    body = {"namespace": NAMESPACE, "name": "orders/settlement", "wait": 20, "holder": "settler-9", "ttl": 1}
    while not ended.is_set():
        server.post("/v1/acquire", body)


def acquire(server, name, holder, **fields):
    answer = server.post("/v1/acquire", {"namespace": NAMESPACE, "name": name, "holder": holder, "ttl": 600, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def release(server, name, lease):
    server.post("/v1/release", {"namespace": NAMESPACE, "name": name, "id": lease["id"]})


def fill(server):
    for number in range(2):
        past = acquire(server, "orders/settlement", f"settler-{number}", purpose=f"batch {number}")
        release(server, "orders/settlement", past)
    held = [
        ("orders/settlement", "settler-2", {"purpose": "batch 2"}),
        ("media/encode", "encoder-1", {"limit": 3}),
        ("media/encode", "encoder-2", {"limit": 3}),
        (LONG, "h" * 200, {"purpose": "p" * 200}),
        (HOSTILE, "<b>bold</b>", {"purpose": "</td><script>alert(1)</script>"}),
    ]
    return [(name, acquire(server, name, holder, **more)) for name, holder, more in held]


@pytest.fixture(scope="module")
def browser():
    with launch_chromium() as found:
        yield found


@contextlib.contextmanager
def opened(browser, server, path, **settings):
    """A page, and that it neither broke the policy nor wrote an error to the console."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **settings})
    context.set_default_timeout(1000 * SECONDS)
    expect.set_options(timeout=1000 * SECONDS)
    context.add_init_script(
        "window.violations = []; addEventListener('securitypolicyviolation', e => violations.push(e.violatedDirective))"
    )
    complaints = []
    page = context.new_page()
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"a dialog: {dialog.message}"))
    page.goto(f"http://127.0.0.1:{server.port}{path}")
    expect(page.locator("#live-words")).to_contain_text("Live")
    try:
        yield page
        assert complaints == []
        assert page.evaluate("violations") == []
    finally:
        context.close()


def axe(page):
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [(each["id"], node["html"][:200]) for each in found["violations"] for node in each["nodes"]]


def take_picture(page, name, width, theme):
    if folder := os.environ.get("LEASEHOLD_PICTURES"):
        page.screenshot(path=f"{folder}/{name}-{width}-{theme}.png", full_page=True)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_keep_policy_access_rules_and_width(browser, server, theme):
    with_axe = server.engine == "redis"  # each run takes seconds, and the engine does not change the HTML's structure
    for name, path in PATHS.items():
        with opened(browser, server, path, color_scheme=theme) as page:
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, (name, width)
                if with_axe and width == {"light": 1440, "dark": 390}[theme]:
                    assert axe(page) == [], (name, width)
                take_picture(page, name, width, theme)
            assert page.locator("img").count() == 0


def test_change_appears_in_two_tabs_without_loading(browser, server):
    with (
        opened(browser, server, LOCKS) as first,
        opened(browser, server, HOME) as second,
    ):
        first.evaluate("window.same = true")
        lease = acquire(server, "billing/close-day", "biller")
        row = first.locator("tr", has_text="biller")
        expect(row).to_contain_text("HELD")
        expect(second.locator("#lede")).to_contain_text("locks are held")
        release(server, "billing/close-day", lease)
        expect(row).to_have_count(0)
        assert first.evaluate("window.same")


def test_countdown_runs_between_frames_and_stops_in_pause(browser, server):
    with opened(browser, server, LOCK) as page:
        left = page.locator("#hero [data-began]").first
        before = left.inner_text()
        expect(left).not_to_have_text(before)
        page.keyboard.press("p")
        expect(page.locator("#live-words")).to_have_text("Paused")
        expect(page.locator("#live")).to_have_attribute("aria-pressed", "true")
        page.keyboard.press("p")
        expect(page.locator("#live-words")).to_contain_text("Live")


def test_script_writes_durations_as_the_server_does(browser, server):
    values = [0, 0.0004, 0.03, 0.0996, 21.34, 59.96, 72, 3599.6, 11_100, 86_380, 792_000, -3]
    with opened(browser, server, LOCKS) as page:
        assert page.evaluate("values => values.map(duration)", values) == [words.duration(each) for each in values]


def test_every_page_is_reached_by_keyboard(browser, server):
    with opened(browser, server, HOME) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        for page_ in PAGES.values():
            page.keyboard.press("g")
            page.keyboard.press(page_.letter)
            expect(page.locator("h1")).to_have_text(page_.title)
        page.keyboard.press("?")
        expect(page.locator("#help")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#help")).to_be_hidden()


def test_filter_by_keyboard_keeps_focus_and_address(browser, server):
    with opened(browser, server, LOCKS) as page:
        page.keyboard.press("/")
        page.keyboard.type("holder:encoder")
        expect(page.locator("tbody tr")).to_have_count(1)
        assert page.evaluate("document.activeElement.id") == "filter"
        assert "filter=holder" in page.url
        page.reload()
        expect(page.locator("tbody tr")).to_have_count(1)


def test_theme_is_switched_and_kept(browser, server):
    with opened(browser, server, HOME, color_scheme="light") as page:
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_broken_stream_falls_back_to_polling_and_says_so(browser, server):
    with opened(browser, server, LOCKS) as page:
        page.route("**/ui/stream*", lambda route: route.fulfill(status=204))
        page.keyboard.press("p")
        page.keyboard.press("p")
        expect(page.locator("#live-words")).to_contain_text("Polling")
        lease = acquire(server, "labels/printer", "packer")
        expect(page.locator("tr", has_text="packer")).to_have_count(1)
        release(server, "labels/printer", lease)


def test_hidden_tab_closes_its_stream(browser, server):
    def streams():
        text = server.get("/metrics").body.decode()
        return float(re.search(r'in_flight\{kind="stream"\} (\S+)', text)[1])

    with opened(browser, server, LOCKS) as page:
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        hide += "document.dispatchEvent(new Event('visibilitychange'))"
        poll(lambda: streams() == 1)
        page.evaluate(hide % "true")
        poll(lambda: streams() == 0)
        page.evaluate(hide % "false")
        poll(lambda: streams() == 1)


def test_break_needs_typed_name_and_reason_and_ends_the_lease(browser, server):
    lease = acquire(server, "exports/nightly", "exporter")
    with opened(browser, server, f"/lock?namespace={NAMESPACE}&name=exports/nightly") as page:
        page.focus("#open-break")
        page.keyboard.press("Enter")
        expect(page.locator("#break-go")).to_be_disabled()
        assert axe(page) == []
        page.keyboard.type("exports/nightly")
        expect(page.locator("#break-go")).to_be_disabled()
        page.keyboard.press("Tab")
        page.keyboard.type("exporter hangs, see OPS-1179")
        take_picture(page, "break", 1440, "light")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator(".notice.good")).to_contain_text("was broken")
        expect(page.locator("#head")).to_contain_text("FREE")
    renewal = {"namespace": NAMESPACE, "name": "exports/nightly", "id": lease["id"], "token": lease["token"]}
    assert server.post("/v1/renew", renewal).status == 410
    with opened(browser, server, f"/audit?namespace={NAMESPACE}&which=break") as page:
        expect(page.locator("#table")).to_contain_text("exporter hangs, see OPS-1179")


def test_login_by_keyboard_leads_back_and_logging_out_ends_it(browser, tmp_path):
    key = new_key(tmp_path / "keys.toml", "mira", "read:*:")
    with running("--keys", str(tmp_path / "keys.toml")) as server, contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/locks")
        assert axe(page) == []
        page.keyboard.type(key)  # the field has the focus
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("Locks")
        expect(page.locator(".foot")).to_contain_text("mira, read-only")
        assert page.evaluate("document.cookie") == ""
        page.get_by_role("button", name="Log out").press("Enter")
        expect(page.locator("h1")).to_have_text("Log in")
        page.goto(f"http://127.0.0.1:{server.port}/locks")
        expect(page.locator("h1")).to_have_text("Log in")


def test_demo_shows_traffic_without_complaints(browser):
    """The pictures of the documentation: LEASEHOLD_PICTURES=docs/pictures, then pngquant."""
    with running("--demo", "--admin", url=None) as server:
        for name, path in (("dashboard", "/"), ("lock", "/lock?namespace=shop&name=orders/settlement")):
            with opened(browser, server, path) as page:
                expect(page.locator("main")).to_contain_text("settler-3")
                if folder := os.environ.get("LEASEHOLD_PICTURES"):
                    page.screenshot(path=f"{folder}/{name}.png", full_page=name == "dashboard")
