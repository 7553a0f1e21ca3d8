"""The pages of the dashboard, without a browser: what each shows, to whom, and that nothing a caller chose is HTML."""

import asyncio
import json
import re
from urllib.parse import quote

import pytest

from leasehold.errors import Unavailable
from leasehold.events import Event
from leasehold.server.dashboard.routes import PAGES
from leasehold.server.peers import Peer
from tests.support.dashboard import in_loop, new_key, serving

PATHS = (*PAGES, "/lock?name=orders/42")
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "orders/\u202egpj.42",  # reverses what follows
    "{{ 7 * 7 }}",
    "javascript:alert(1)",
    "a" * 255,
)


async def happen(site, *kinds, name="orders/42", **fields):
    """Events as the server itself would report them."""
    at = site.app.service.runtime.wall()
    for kind in kinds:
        site.app.history(Event(kind, "memory", "", name, at, mode="exclusive", **fields))


async def fill(site, name="orders/42", holder="web-3"):
    """A holder, a waiter, and a past with a loss and a refused write."""
    for token in (7, 8):
        await happen(site, "granted", name=name, token=token, fingerprint=f"f{token}", holder=holder, ttl=10.0)
        await happen(site, "lost", "stale_token", name=name, token=token, fingerprint=f"f{token}", holder=holder)
    lease = await site.acquire(name, holder=holder, purpose=holder)
    return lease, await site.waiter(name, holder=holder, purpose=holder)


async def stop(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_page_is_well_formed_and_may_load_only_its_own_files(path):
    async with serving() as site:
        _, waiter = await fill(site)
        answer = await site.get(path)
        assert answer.status == 200, answer.html
        assert "default-src 'none'; script-src 'self'; style-src 'self';" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert (
            answer.headers["referrer-policy"] == "same-origin"
        )  # or forms are refused: they come with the origin null
        page = answer.page
        assert [tag for tag, _ in page.elements].count("h1") == 1
        assert all(script["src"].startswith("/ui/static/") for script in page.all("script"))
        assert not any(name == "style" or name.startswith("on") for _, found in page.elements for name in found)
        assert len(page.all("table")) == len(page.all("caption"))
        for link in (*page.all("link"), *page.all("script")):
            assert (await site.get(link.get("href") or link["src"])).status == 200
        await stop(waiter)


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_empty_server_shows_every_page(path):
    async with serving() as site:
        answer = await site.get(path)
        assert answer.status == 200, answer.html
        assert answer.page.live


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
@in_loop
async def test_hostile_names_and_holders_are_shown_as_text(text, tmp_path):
    async with serving(audit=tmp_path / "audit.jsonl") as site:
        site.app.dashboard.admin = True
        _, waiter = await fill(site, name=text, holder=text[:200] if text.isprintable() else "web-3")
        for path in (*PAGES, "/audit?which=all", f"/lock?name={quote(text, safe='')}"):
            answer = await site.get(path)
            assert answer.status == 200, answer.html
            page = answer.page  # well formed: nothing broke out of its element
            assert "<script>alert" not in answer.html
            assert not page.all("img")
            assert "\u202e" not in answer.html.replace(f'value="{text}"', "").replace(f'data-name="{text}"', "")
            assert not any((found.get("href") or "").startswith("javascript:") for found in page.all("a"))
            assert "49" not in page.ids.get("head", "")
        await stop(waiter)


@in_loop
async def test_lock_page_shows_holder_token_queue_and_past():
    async with serving() as site:
        lease, waiter = await fill(site)
        page = (await site.get("/lock?name=orders/42")).page
        assert "web-3" in page.ids["hero"]
        assert f"{lease['token']:,}" in page.ids["hero"]
        assert "HELD" in page.ids["head"]
        assert "web-3" in page.ids["queue"]
        assert "REFUSED" in page.ids["grants"]
        assert "Lost" in page.ids["timeline"]
        assert "The fence refuses a write" in page.ids["timeline"]
        assert "open-break" not in page.ids  # the server was not started with --admin
        await stop(waiter)


@in_loop
async def test_locks_page_filters_by_part_of_name_and_by_holder():
    async with serving() as site:
        await site.acquire("orders/1", holder="web-1")
        await site.acquire("stock/1", holder="packer-6")
        for query, shown in (
            ("", {"orders/1", "stock/1"}),
            ("?filter=ORDERS", {"orders/1"}),
            ("?filter=holder:pack", {"stock/1"}),
            ("?filter=none", set()),
            ("?tab=blocking", set()),
            ("?tab=unheard-of", {"orders/1", "stock/1"}),
        ):
            page = (await site.get(f"/locks{query}")).page
            assert {name for name in ("orders/1", "stock/1") if name in page.ids["table"]} == shown, query


@in_loop
async def test_locks_page_sorts_by_the_column_asked_for():
    async with serving() as site:
        for name in ("b", "a", "c"):
            await site.acquire(name, ttl={"b": 10, "a": 20, "c": 15}[name])
        for sort, order in (("name", "abc"), ("left", "bca")):
            answer = await site.get(f"/locks?sort={sort}")
            assert "".join(re.findall(r'href="/lock\?name=(.)"', answer.html)) == order
            assert answer.html.count("aria-sort=") == 1


@in_loop
async def test_locks_page_is_bounded_and_says_how_many_fit():
    async with serving() as site:
        for number in range(120):
            await site.acquire(f"user:{number}")
        page = (await site.get("/locks")).page
        assert sum(part.startswith("l-") for part in page.ids) == 100
        assert "100 of 120 shown" in page.ids["shown"]


@in_loop
async def test_overview_counts_and_names_what_needs_a_look():
    async with serving() as site:
        _, waiter = await fill(site)
        page = (await site.get("/")).page
        assert "1 lock is held, 1 caller waits, and one thing needs attention." in page.ids["lede"]
        assert "orders/42" in page.ids["warnings"]
        assert "A late write was refused" in page.ids["feed"]
        await stop(waiter)


@in_loop
async def test_engine_that_does_not_answer_gives_a_page_that_says_so(monkeypatch):
    async with serving() as site:

        async def silent(*_):
            raise Unavailable("10.0.0.5:6379 does not answer")

        monkeypatch.setattr(site.app.service.engine, "inspect", silent)
        answer = await site.get("/locks")
        assert answer.status == 503
        assert "did not answer" in answer.html
        assert "10.0.0.5" not in answer.html
        assert answer.page.all("h1")


@in_loop
async def test_owners_are_counted_the_same_in_menu_and_page():
    async with serving() as site:
        cooling = await site.acquire("billing/close-day", holder="biller", min_hold=60)
        await site.call("/v1/release", name="billing/close-day", id=cooling["id"])
        await site.acquire("orders/42", holder="web-3")
        waiter = await site.waiter("orders/42", holder="web-4")
        page = (await site.get("/owners")).page
        assert "Two owners hold or wait, and all is well." in page.ids["lede"]
        assert page.ids["count"] == "2"
        assert "Owners2" in page.ids["nav"]
        await stop(waiter)


@in_loop
async def test_peer_that_does_not_answer_is_named():
    async with serving(peers=Peer.parse("http://127.0.0.1:1")) as site:
        page = (await site.get("/")).page
        assert "No answer from 127.0.0.1:1" in page.ids["notice"]
        assert "does not answer" in page.ids["servers"]


@in_loop
async def test_address_of_a_peer_is_shown_to_unrestricted_keys_only(tmp_path):
    file = tmp_path / "keys.toml"
    every, part = new_key(file, "every", "read:*:"), new_key(file, "part", "read::")
    async with serving(key_file=file, peers=Peer.parse("http://127.0.0.1:1,127.0.0.2:1")) as site:
        for path in ("/", "/v1/history?name=orders/42", "/v1/owners", "/v1/incidents?namespace=", "/v1/stats"):
            assert "127.0.0.2:1" in (await site.get(path, authorization=f"Bearer {every}")).html, path
            shown = (await site.get(path, authorization=f"Bearer {part}")).html
            assert "127.0.0." not in shown, path
            assert "peer 1" in shown, path
            assert "peer 2" in shown, path


@in_loop
async def test_unknown_paths_stay_problem_documents():
    async with serving() as site:
        answer = await site.get("/locks/orders/42")
        assert answer.status == 404
        assert json.loads(answer.html)["type"].endswith("not-found")


# -- rights


@in_loop
async def test_caller_sees_only_the_names_it_may_read(tmp_path):
    file = tmp_path / "keys.toml"
    key = new_key(file, "web", "read,lock:shop:orders/")
    other = new_key(file, "ops", "read,lock:*:")
    async with serving(key_file=file, audit=tmp_path / "audit.jsonl") as site:
        for name in ("orders/42", "secret/plan"):
            body = json.dumps({"name": name, "namespace": "shop", "ttl": 60, "holder": f"holder of {name}"}).encode()
            await site.request("POST", "/v1/acquire", body, {"authorization": f"Bearer {other}"})
            at = site.app.service.runtime.wall()
            site.app.history(Event("lost", "memory", "shop", name, at, token=3, holder=f"holder of {name}"))
        for path in PAGES:
            where = f"{path}?namespace=shop&which=all"
            own = await site.get(where, authorization=f"Bearer {key}")
            assert own.status == 200
            assert "secret" not in own.html, path
            everything = await site.get(where, authorization=f"Bearer {other}")
            assert ("secret" in everything.html) == (path != "/engines"), path
        for where in ("/lock?namespace=shop&name=secret/plan", "/locks?namespace=bank"):
            assert (await site.get(where, authorization=f"Bearer {key}")).status == 403


@in_loop
async def test_overview_of_a_part_has_no_sums_and_says_so(tmp_path):
    file = tmp_path / "keys.toml"
    part = new_key(file, "part", "read::orders/")
    everything = new_key(file, "everything", "read,lock:*:")
    async with serving(key_file=file) as site:
        for name in ("orders/42", "secret/1"):
            body = json.dumps({"name": name}).encode()
            headers = {"authorization": f"Bearer {everything}"}
            assert (await site.request("POST", "/v1/acquire", body, headers)).status == 200
        page = (await site.get("/", authorization=f"Bearer {part}")).page
        assert "1 lock is held" in page.ids["lede"]
        assert "may read the whole namespace" in page.ids["groups"]
        assert "Nothing was acquired" not in page.text
        assert "waiter" not in page.ids["servers"], "those of all tenants"
        page = (await site.get("/", authorization=f"Bearer {everything}")).page
        assert "0 waiters" in page.ids["servers"]


@in_loop
async def test_overview_counts_locks_and_not_their_slots():
    async with serving() as site:
        for _ in range(3):
            await site.acquire("downloads", limit=3)
        page = (await site.get("/")).page
        assert page.ids["lede"].startswith("1 lock is held, no caller waits")
