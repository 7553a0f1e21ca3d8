"""Breaking a lock in the dashboard: only what was seen, only with a reason, only by those who may."""

import json

import pytest

from tests.support.dashboard import in_loop, new_key, serving

REASON = "web-3 hangs, see OPS-1182"


def form(lease, **changed):
    fields = {"namespace": "", "name": "orders/42", "typed": "orders/42", "token": lease["token"], "reason": REASON}
    return fields | changed


async def holder(site):
    found = await site.app.service.inspect("", "orders/42", True, site.app.service.runtime.now() + 60)
    return [(each.holder.label, each.token) for each in found if each.state == "held"]


@in_loop
async def test_break_ends_the_lease_and_shows_the_lock_again():
    async with serving() as site:
        site.app.dashboard.admin = True
        lease = await site.acquire("orders/42", holder="web-3")
        page = (await site.get("/lock?name=orders/42")).page
        assert "open-break" in page.ids
        answer = await site.post("/ui/break", form(lease))
        assert (answer.status, answer.headers["location"]) == (303, f"/lock?name=orders%2F42&broken={lease['token']}")
        assert await holder(site) == []
        shown = await site.get(answer.headers["location"])
        assert "was broken" in shown.html
        (incident,) = site.app.history.incidents()
        assert (incident.kind, incident.reason, incident.token) == ("broken", REASON, lease["token"])


@in_loop
async def test_lock_that_moved_on_is_not_broken():
    """The token that was seen is compared by the engine, in the step that breaks."""
    async with serving() as site:
        site.app.dashboard.admin = True
        lease = await site.acquire("orders/42", holder="web-3")
        await site.get("/lock?name=orders/42")
        await site.call("/v1/release", name="orders/42", id=lease["id"])
        newer = await site.acquire("orders/42", holder="web-4")
        answer = await site.post("/ui/break", form(lease))
        assert answer.status == 412
        assert "Nothing was broken" in answer.html
        assert await holder(site) == [("web-4", newer["token"])]
        assert site.app.history.incidents() == []


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"typed": "orders/43"}, 422),
        ({"typed": ""}, 422),
        ({"reason": "hangs"}, 422),
        ({"reason": " " * 20}, 422),
        ({"reason": "a" * 501}, 422),
        ({"token": ""}, 422),
        ({"token": "-1"}, 422),
        ({"token": "x"}, 422),
        ({"name": "", "typed": ""}, 422),
        ({"form": "0" * 32}, 403),
    ],
)
@in_loop
async def test_incomplete_form_breaks_nothing(changed, status):
    async with serving() as site:
        site.app.dashboard.admin = True
        lease = await site.acquire("orders/42", holder="web-3")
        await site.get("/lock?name=orders/42")
        assert (await site.post("/ui/break", form(lease, **changed))).status == status
        assert await holder(site) == [("web-3", lease["token"])]


@in_loop
async def test_server_without_admin_breaks_nothing():
    async with serving() as site:
        lease = await site.acquire("orders/42", holder="web-3")
        page = (await site.get("/lock?name=orders/42")).page
        assert "break" not in page.ids
        assert (await site.post("/ui/break", form(lease))).status == 403
        assert await holder(site) == [("web-3", lease["token"])]


@in_loop
async def test_break_needs_the_right_and_is_recorded_with_the_person(tmp_path):
    file, log = tmp_path / "keys.toml", tmp_path / "audit.jsonl"
    looker = new_key(file, "looker", "read,lock:*:")
    mira = new_key(file, "mira", "read,break:*:orders/")
    async with serving(key_file=file, audit=log) as site:
        site.app.dashboard.admin = True
        body = json.dumps({"name": "orders/42", "ttl": 60}).encode()
        answer = await site.request("POST", "/v1/acquire", body, {"authorization": f"Bearer {looker}"})
        lease = json.loads(answer.body)
        for key, status in ((looker, 403), (mira, 303)):
            await site.get("/login")
            await site.post("/login", {"key": key})
            page = (await site.get("/lock?name=orders/42")).page
            assert ("open-break" in page.ids) == (status == 303)
            assert (await site.post("/ui/break", form(lease))).status == status
        assert await holder(site) == []
        site.app.audit.file.flush()
        records = [json.loads(line) for line in log.read_text().splitlines()]
        denied = [record for record in records if record["action"] == "denied"]
        (broken,) = [record for record in records if record["action"] == "break"]
        assert [record["who"]["subject"] for record in denied] == ["looker"]
        assert (broken["who"]["subject"], broken["why"], broken["token"]) == ("mira", REASON, lease["token"])
        shown = (await site.get("/audit?which=break")).page
        assert "mira" in shown.ids["table"]
        assert REASON in shown.ids["table"]
