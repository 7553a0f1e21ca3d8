"""Logging in with an API key: what the browser keeps, and what other pages and other paths cannot do with it."""

import json
from time import monotonic, thread_time
from urllib.parse import urlencode

import pytest

from leasehold.server import keys
from tests.support.dashboard import Answer, in_loop, new_key, serving


@in_loop
async def test_page_without_a_key_leads_to_the_login_and_back(tmp_path):
    key = new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        answer = await site.get("/locks?tab=risk")
        assert (answer.status, answer.headers["location"]) == (303, "/login?next=%2Flocks%3Ftab%3Drisk")
        login = await site.get(answer.headers["location"])
        assert login.status == 200
        assert login.page.all("h1")
        done = await site.post("/login", {"key": key, "next": "/locks?tab=risk"})
        assert (done.status, done.headers["location"]) == (303, "/locks?tab=risk")
        page = await site.get("/locks?tab=risk")
        assert page.status == 200
        assert "ops" in page.html


@in_loop
async def test_key_is_kept_in_a_cookie_that_only_this_site_can_use(tmp_path):
    key = new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        for secure, prefix in ((False, ""), (True, "__Host-")):
            site.app.dashboard.secure = secure
            await site.get("/login")
            cookie = (await site.post("/login", {"key": key})).headers["set-cookie"]
            assert cookie.startswith(f"{prefix}leasehold_key={key}; Max-Age=28800; Path=/; HttpOnly; SameSite=Strict")
            assert cookie.endswith("; Secure") == secure
            assert (await site.get("/locks")).status == 200
            ended = (await site.post("/logout", {})).headers["set-cookie"]
            assert ended.startswith(f"{prefix}leasehold_key=; Max-Age=0;")
            assert (await site.get("/locks")).status == 303


@in_loop
async def test_cookie_that_another_host_may_have_set_does_not_count_over_tls(tmp_path):
    key = new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        site.cookies = {"leasehold_key": key, "leasehold_form": "f" * 32}
        assert (await site.get("/locks")).status == 200
        site.app.dashboard.secure = True
        assert (await site.get("/locks")).status == 303
        assert (await site.post("/login", {"form": "f" * 32, "key": key})).status == 403


@pytest.mark.parametrize(("origin", "secure"), [("https://locks.example", True), ("http://localhost:7420", False)])
@in_loop
async def test_cookie_is_sent_only_over_tls_if_a_proxy_adds_it(origin, secure, tmp_path):
    key = new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        await site.get("/login")
        form = urlencode({"form": site.cookies["leasehold_form"], "key": key}).encode()
        answer = Answer(await site.request("POST", "/login", form, {"origin": origin}))
        assert answer.headers["set-cookie"].endswith("; Secure") == secure
        assert ("__Host-leasehold_key" in site.cookies) == secure
        assert (await site.get("/locks")).status == 200


@pytest.mark.parametrize("wrong", ["", "lh_ops_" + "0" * 64, "ops", "lh_ops_" + "a" * 600, "\N{SNOWMAN}"])
@in_loop
async def test_wrong_key_is_refused_without_a_cookie(wrong, tmp_path):
    new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        await site.get("/login")
        answer = await site.post("/login", {"key": wrong})
        assert answer.status == 401
        assert "leasehold_key" not in site.cookies
        assert "not known here" in answer.html


@pytest.mark.parametrize(
    "other",
    [
        'prefs={"a": "b", "c": 1}',
        "foo[bar]=1",
        "path=/x",
        "a b=c",
        'x="unclosed',
        "=",
        "",
        "leasehold_key2=x",
        "\xe9=1",
    ],
)
@in_loop
async def test_cookies_of_other_programs_do_not_end_the_session(other, tmp_path):
    """A browser sends cookies to all ports of a host, so localhost has those of every program."""
    key = new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        for cookies in (f"{other}; leasehold_key={key}", f"leasehold_key={key}; {other}"):
            assert (await site.get("/locks", cookie=cookies)).status == 200


@pytest.mark.parametrize("piece", ["\\", '\\"', '"', "=", ";", "leasehold_key=", "\\073"])
@in_loop
async def test_large_cookie_takes_no_time(piece, tmp_path):
    """16 kB of backslashes kept the event loop busy for half a second, without any key."""
    new_key(tmp_path / "keys.toml", "ops", "read:*:")
    cookie = f'leasehold_key="{piece * (16_000 // len(piece))}"'
    async with serving(key_file=tmp_path / "keys.toml") as site:
        began = thread_time()
        assert (await site.get("/locks", cookie=cookie)).status == 303
        assert thread_time() - began < 0.25


@pytest.mark.parametrize("path", ["/", "/ui/stream?page=locks"])
@in_loop
async def test_wrong_key_of_a_page_is_answered_late(path, tmp_path):
    """Otherwise a page would be the place to guess keys."""
    new_key(tmp_path / "keys.toml", "ops", "read:*:")
    wrong = "lh_ops_" + "0" * 64
    async with serving(key_file=tmp_path / "keys.toml") as site:
        for headers in ({"authorization": f"Bearer {wrong}"}, {"cookie": f"leasehold_key={wrong}"}):
            began = monotonic()
            assert (await site.get(path, **headers)).status == 303
            assert monotonic() - began >= 0.1


@in_loop
async def test_break_without_a_session_leads_to_the_login_alone(tmp_path):
    new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        assert (await site.post("/ui/break", {})).headers["location"] == "/login"


@in_loop
async def test_api_does_not_accept_the_cookie(tmp_path):
    key = new_key(tmp_path / "keys.toml", "ops", "read,lock,break:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        await site.get("/login")
        await site.post("/login", {"key": key})
        answer = await site.request("POST", "/v1/acquire", json.dumps({"name": "a"}).encode())
        assert answer.status == 401


@pytest.mark.parametrize("there", ["https://evil.example", "//evil.example", "/\\evil.example", "javascript:1", ""])
@in_loop
async def test_login_leads_only_to_pages_of_this_server(there, tmp_path):
    key = new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        await site.get("/login")
        assert (await site.post("/login", {"key": key, "next": there})).headers["location"] == "/"


@pytest.mark.parametrize("token", ["", "0" * 32])
@in_loop
async def test_form_of_another_page_is_refused(token, tmp_path):
    key = new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        await site.get("/login")
        answer = await site.post("/login", {"key": key, "form": token})
        assert answer.status == 403
        assert "leasehold_key" not in site.cookies


@in_loop
async def test_form_without_its_cookie_is_refused(tmp_path):
    key = new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        assert (await site.post("/login", {"key": key, "form": ""})).status == 403


@in_loop
async def test_logging_out_and_revoking_the_key_end_the_session(tmp_path):
    file = tmp_path / "keys.toml"
    key = new_key(file, "ops", "read:*:")
    new_key(file, "other", "read:*:")
    async with serving(key_file=file) as site:
        await site.get("/login")
        await site.post("/login", {"key": key})
        assert (await site.get("/")).status == 200
        await site.post("/logout", {})
        assert (await site.get("/")).status == 303
        await site.post("/login", {"key": key})
        keys.revoke(file, "ops")
        site.app.authenticator.refresh(force=True)
        assert (await site.get("/")).status == 303


@in_loop
async def test_server_without_authentication_needs_no_login():
    async with serving() as site:
        answer = await site.get("/")
        assert answer.status == 200
        assert "Log out" not in answer.html
