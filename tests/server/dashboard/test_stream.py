"""The live stream: what a frame has, who shares the work, and how a stream ends."""

import asyncio
import contextlib

import pytest

from leasehold.server import keys
from leasehold.server.dashboard import stream
from leasehold.server.dashboard.routes import PAGES
from leasehold.server.limits import MAX_LISTS
from leasehold.server.messages import EventStream
from tests.support import probe_server
from tests.support.dashboard import events, in_loop, new_key, serving

QUERIES = [*(f"page={page.key}" for page in PAGES.values()), "page=locks&name=orders/42"]


@pytest.fixture(autouse=True)
def patient_streams(monkeypatch):
    """A busy machine may take seconds between two frames."""
    monkeypatch.setattr(stream, "SLOW_READER", 600.0)


@contextlib.asynccontextmanager
async def tab(site, query, **headers):
    opened = await site.request("GET", f"/ui/stream?{query}", headers=headers)
    assert isinstance(opened, EventStream), opened
    try:
        yield opened
    finally:
        opened.close()


async def frame(opened):
    """The next event of a tab: kind, data and id."""
    data = await opened.next_events()
    assert data is not None
    (event,) = events(data)
    return event


async def next_change(opened):
    """The data of the next frame with a change. A picture without changes by this server is good for a second."""
    for _ in range(100):
        _, data, _ = await frame(opened)
        if data["parts"]:
            return data
    raise AssertionError("nothing changed")


@pytest.mark.parametrize("query", QUERIES)
@in_loop
async def test_first_frame_has_every_live_part_of_the_page(query):
    async with serving() as site:
        await site.acquire("orders/42", holder="web-3")
        path = {page.key: path for path, page in PAGES.items()}[query.split("=")[1].split("&")[0]]
        path = "/lock?name=orders/42" if "name=" in query else path
        page = (await site.get(path)).page
        async with tab(site, query) as opened:
            kind, data, _ = await frame(opened)
            assert kind == "frame"
            sent = " ".join(data["parts"].values())
            assert page.live
            assert [part for part in page.live if f'id="{part}"' not in sent] == []
            assert data["as_of"] <= data["now"]


@in_loop
async def test_later_frames_have_only_what_changed():
    async with serving() as site:
        await site.acquire("orders/42", holder="web-3")
        await site.acquire("orders/43", holder="web-3", ttl=600)
        async with tab(site, "page=locks") as opened:
            await frame(opened)
            _, data, _ = await frame(opened)
            assert data["parts"] == {}, data["parts"].keys()
            await site.acquire("stock/1", holder="api-1")
            _, data, _ = await frame(opened)
            assert set(data["parts"]) == {"nav", "tabs", "table", "shown"}
            waiter = await site.waiter("orders/43", holder="web-4")
            data = await next_change(opened)
            assert "table" in data["parts"]  # the order of the rows changed
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)


@in_loop
async def test_row_that_changed_is_sent_without_the_others():
    async with serving() as site:
        lease = await site.acquire("orders/42", holder="web-3", ttl=10)
        await site.acquire("orders/43", holder="web-3", ttl=600)
        async with tab(site, "page=locks") as opened:
            await frame(opened)
            await asyncio.sleep(0.4)  # pause: the renewal must move the end by more than clocks differ
            await site.call("/v1/renew", name="orders/42", id=lease["id"], token=lease["token"], ttl=20)
            data = await next_change(opened)
            (html,) = data["parts"].values()
            assert html.startswith("<tr")
            assert "orders/" in html


@in_loop
async def test_tabs_with_the_same_page_share_one_rendering(monkeypatch):
    async with serving() as site:
        rendered = []
        original = getattr(*probe_server.FRAME.of(site.app.dashboard))
        monkeypatch.setattr(
            *probe_server.FRAME.of(site.app.dashboard), lambda *given: rendered.append(given[0].key) or original(*given)
        )
        async with contextlib.AsyncExitStack() as stack:
            tabs = [await stack.enter_async_context(tab(site, "page=locks")) for _ in range(20)]
            first = await asyncio.gather(*map(frame, tabs))
            assert {data["as_of"] for _, data, _ in first} == {first[0][1]["as_of"]}
            assert rendered == ["locks"]
            await asyncio.gather(*map(frame, tabs))
            assert rendered == ["locks", "locks"]


@in_loop
async def test_many_different_pages_share_a_tenth_of_a_core(monkeypatch):
    """A tenant could open a hundred tabs, each with a filter of its own, and renewals would wait for all of them."""
    now = spent = 0.0

    async def render():
        nonlocal spent
        spent += 0.02
        return stream.Rendered({}, now)

    monkeypatch.setattr(stream, "thread_time", lambda: spent)
    streams = stream.Streams(lambda: now, lambda: now, lambda: "id")
    for number in range(100):
        streams.open(number, render, contextlib.nullcontext, "", "shop", lambda: True)
    channels = list(probe_server.channels(streams).values())
    for each in channels:
        await each.advance(render, contextlib.nullcontext)
    before = spent
    for _ in range(400):
        now += stream.INTERVAL
        for each in channels:
            await each.advance(render, contextlib.nullcontext)
    assert 0.05 * now < spent - before < 0.12 * now


@in_loop
async def test_new_pages_of_one_caller_are_not_rendered_all_at_once(monkeypatch):
    """A hundred connections that opened ever new pages held up the renewals of others for six seconds."""
    async with serving() as site, contextlib.AsyncExitStack() as stack:
        rendered = []
        original = getattr(*probe_server.FRAME.of(site.app.dashboard))
        monkeypatch.setattr(
            *probe_server.FRAME.of(site.app.dashboard), lambda *given: rendered.append(1) or original(*given)
        )
        tabs = [await stack.enter_async_context(tab(site, f"page=locks&which={number}")) for number in range(30)]
        frames = asyncio.gather(*map(frame, tabs))
        while not frames.done():
            before = len(rendered)
            await asyncio.sleep(0)
            assert len(rendered) - before <= 2 * MAX_LISTS, "this test counts turns of its own"
        assert len(rendered) == 30


@in_loop
async def test_lists_of_one_caller_do_not_hold_up_the_page_of_another(tmp_path):
    """Callers with the same rights share a page. It was rendered in the turn of the one whose tab was open first."""
    file = tmp_path / "keys.toml"
    first, second = (f"Bearer {new_key(file, who, 'read:*:')}" for who in ("first", "second"))
    async with (
        serving(key_file=file) as site,
        tab(site, "page=locks", authorization=first) as held_up,
        tab(site, "page=locks", authorization=second) as opened,
        contextlib.AsyncExitStack() as lists,
    ):
        caller = site.app.authenticator.identify(first.encode(), ())
        for _ in range(MAX_LISTS):
            await lists.enter_async_context(site.app.limits.listing(caller, 60))
        waiting = asyncio.create_task(frame(held_up))
        await asyncio.sleep(0)
        assert (await frame(opened))[0] == "frame"
        assert not waiting.done()
        await lists.aclose()
        assert (await waiting)[0] == "frame"


@in_loop
async def test_few_pages_are_kept_for_tabs_that_may_come_back(monkeypatch):
    """A caller could open and close tabs with ever new pages: half a megabyte each stayed for half a minute."""
    monkeypatch.setattr(stream, "MAX_CHANNELS", 5)
    async with serving() as site, tab(site, "page=owners") as opened:
        for number in range(12):
            async with tab(site, f"page=locks&which={number}") as other:
                assert (await frame(other))[0] == "frame"
        assert len(probe_server.channels(site.app.dashboard.streams)) == 5
        assert (await frame(opened))[0] == "frame"


@in_loop
async def test_pages_without_a_tab_are_forgotten(monkeypatch):
    """They stayed until another tab was opened: half a megabyte each."""
    monkeypatch.setattr(*probe_server.KEEP_CHANNEL, 0.0)
    async with serving() as site:
        async with tab(site, "page=locks") as opened:
            await frame(opened)
        async with asyncio.timeout(60):
            while probe_server.channels(site.app.dashboard.streams):
                await asyncio.sleep(0.01)


@in_loop
async def test_caller_with_too_many_tabs_is_refused_another(monkeypatch):
    monkeypatch.setattr(stream, "MAX_TABS", 3)
    async with serving() as site, contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(tab(site, "page=locks"))
        assert (await site.request("GET", "/ui/stream?page=owners")).status == 429
        assert (await site.request("GET", "/owners")).status == 200, "it can poll"
        probe_server.tabs(site.app.dashboard.streams).pop().close()
        async with tab(site, "page=owners") as opened:
            assert (await frame(opened))[0] == "frame"


@in_loop
async def test_fifty_tabs_cost_the_engine_two_inspects_a_second(monkeypatch):
    async with serving() as site:
        asked = []
        original = site.app.service.engine.inspect

        async def counted(*given):
            asked.append(given)
            return await original(*given)

        monkeypatch.setattr(site.app.service.engine, "inspect", counted)
        async with contextlib.AsyncExitStack() as stack:
            began = asyncio.get_running_loop().time()
            tabs = [await stack.enter_async_context(tab(site, QUERIES[n % len(QUERIES)])) for n in range(50)]
            for number in range(4):
                await site.acquire(f"orders/{number}")  # outdates the picture
                await asyncio.gather(*map(frame, tabs))
            elapsed = asyncio.get_running_loop().time() - began
        assert 1 < len(asked) <= 2 * elapsed + 3


@in_loop
async def test_tab_that_comes_back_gets_what_changed_meanwhile():
    async with serving() as site:
        await site.acquire("orders/42")
        async with tab(site, "page=locks") as opened:
            _, _, event_id = await frame(opened)
        async with tab(site, "page=locks", **{"last-event-id": event_id}) as opened:
            await asyncio.sleep(stream.INTERVAL)  # pause: the tabs take frames meanwhile
            await site.acquire("stock/1")
            _, data, _ = await frame(opened)
            assert set(data["parts"]) == {"nav", "tabs", "table", "shown"}
        for unknown in ("", "x", "ffff-9", f"{event_id}9999", "-1"):
            async with tab(site, "page=locks", **{"last-event-id": unknown}) as opened:
                await asyncio.sleep(stream.INTERVAL)  # pause: the tabs take frames meanwhile
                _, data, _ = await frame(opened)
                assert ("table" in data["parts"]) == (not unknown.startswith(event_id))


@in_loop
async def test_slow_reader_gets_resync_and_the_stream_ends(monkeypatch):
    monkeypatch.setattr(stream, "SLOW_READER", 0.05)
    async with serving() as site, tab(site, "page=locks") as opened:
        await frame(opened)
        await asyncio.sleep(0.2)  # pause: so long the frame took to leave
        assert (await frame(opened))[0] == "resync"
        assert await opened.next_events() is None
        assert site.app.dashboard.streams.resyncs == 1


@in_loop
async def test_tab_that_is_too_far_behind_gets_resync(monkeypatch):
    async with serving() as site, tab(site, "page=locks") as opened:
        assert (await frame(opened))[0] == "frame"
        monkeypatch.setattr(stream, "MAX_FRAME", 100)
        await site.acquire("orders/42")
        assert (await frame(opened))[0] == "resync"
        assert await opened.next_events() is None


@in_loop
async def test_largest_table_fits_into_a_frame():
    async with serving() as site:
        for number in range(101):
            await site.acquire(f"{number:03}" + "é" * 126, holder="h" * 200, purpose="p" * 200)
        async with tab(site, "page=locks") as opened:
            _, data, _ = await frame(opened)
            assert len(data["parts"]["table"].encode()) < stream.MAX_FRAME


@in_loop
async def test_drain_ends_every_tab_at_once():
    async with serving() as site, contextlib.AsyncExitStack() as stack:
        tabs = [await stack.enter_async_context(tab(site, f"page={page.key}")) for page in PAGES.values()]
        await asyncio.gather(*map(frame, tabs))
        waiting = [asyncio.ensure_future(opened.next_events()) for opened in tabs]
        await asyncio.sleep(0)
        site.app.drain()
        assert set(await asyncio.gather(*waiting)) == {b"event: drain\ndata:\n\n"}
        assert [await opened.next_events() for opened in tabs] == [None] * len(tabs)
        assert (await site.request("GET", "/ui/stream?page=locks")).status == 503


@in_loop
async def test_tab_that_is_closed_is_forgotten():
    async with serving() as site:
        async with tab(site, "page=locks") as opened:
            await frame(opened)
            assert len(site.app.dashboard.streams) == 1
        assert len(site.app.dashboard.streams) == 0


@in_loop
async def test_revoked_key_ends_its_stream(tmp_path):
    file = tmp_path / "keys.toml"
    key = new_key(file, "ops", "read:*:")
    new_key(file, "other", "read:*:")
    async with serving(key_file=file) as site, tab(site, "page=locks", authorization=f"Bearer {key}") as opened:
        await frame(opened)
        keys.revoke(file, "ops")
        site.app.authenticator.refresh(force=True)
        assert (await frame(opened))[0] == "resync"


@in_loop
async def test_stream_needs_a_key_and_a_known_page(tmp_path):
    new_key(tmp_path / "keys.toml", "ops", "read:*:")
    async with serving(key_file=tmp_path / "keys.toml") as site:
        assert (await site.request("GET", "/ui/stream?page=locks")).status == 303
    async with serving() as site:
        for query in ("", "?page=none", "?page=lock"):
            assert (await site.request("GET", f"/ui/stream{query}")).status == 404


@in_loop
async def test_page_that_cannot_be_rendered_becomes_resync(monkeypatch):
    async with serving() as site, tab(site, "page=locks") as opened:
        await frame(opened)

        async def broken(*_):
            raise RuntimeError("a bug")

        monkeypatch.setattr(*probe_server.CONTEXT.of(site.app.dashboard), broken)
        assert (await frame(opened))[0] == "resync"
