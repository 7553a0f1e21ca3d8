"""Lists of locks come in pages: complete and in order, and no server can make a client take much memory."""

import asyncio
import tracemalloc
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold import AsyncClient, Unavailable
from leasehold.engines.remote import wire
from leasehold.engines.remote.parsing import MAX_BODY
from leasehold.errors import ListingTooLong
from leasehold.model import Holder, Holding
from leasehold.server import problems
from tests.support import probe_remote, probe_server
from tests.support.scripted_server import free_engine

SHORTEST = Holding("", "a", "held", "shared", "lock", 1, "", Holder("", "", 0, ""), 0.0, 0.0, 1)


def claims(names):
    return [
        Holding("", name, "waiting", "exclusive", "lock", 1, f"{number:016}", Holder("web"), 0.0, 9.0)
        for number, name in enumerate(names)
    ]


@given(st.lists(st.text(max_size=3), max_size=30), st.integers(1, 3000))
def test_pages_of_any_size_have_each_claim_once_in_order(names, size):
    found = claims(names)
    listed, after = [], None
    with mock.patch.object(*probe_server.PAGE_BYTES, size):
        for _ in range(len(found) + 1):
            page, after = probe_server.make_page(found, after)
            assert len(wire.encode(page)) <= size + 1 or len(page) <= 1
            listed += page
            if after is None:
                break
    in_order = sorted(found, key=lambda holding: holding.name)
    assert [each["fingerprint"] for each in listed] == [each.fingerprint for each in in_order]


def listing(driver):
    return driver.run(driver.engine.inspect("", "", False, driver.runtime.now() + 60))


def test_client_asks_for_the_next_page_until_there_is_none(driver, start_server):
    def pages(call):
        if call["do"] != "inspect":
            return free_engine(call)
        number = call["after"][1] if "after" in call else 0
        more = {"more": ["a", number + 2]} if number < 4 else {}
        return {"value": [wire.holding_to_json(each) for each in claims("aa")], **more}

    server = start_server(pages)
    assert len(listing(driver.open(server))) == 6
    asked = [call for call in server.calls if call["do"] == "inspect"]
    assert [call.get("after") for call in asked] == [None, ["a", 2], ["a", 4]]


def test_lists_that_wait_for_a_connection_are_sent_one_by_one(start_lock_server):
    """A server refuses a request with two lists: the answer could be longer than a client accepts."""
    server = start_lock_server()

    async def run():
        async with AsyncClient(f"http://127.0.0.1:{server.port}", call_timeout=60) as client, client.lock("a"):
            return await asyncio.gather(*[client.inspect() for _ in range(30)])

    assert [[each.name for each in found] for found in asyncio.run(run())] == [["a"]] * 30


def test_list_that_does_not_end_is_unavailable(driver, start_server):
    server = start_server(lambda call: {**free_engine(call), "more": ["a", 1]})
    with pytest.raises(ListingTooLong, match="ask for the names with one prefix"):
        listing(driver.open(server))
    assert server.verbs().count("inspect") == probe_remote.MAX_PAGES


def test_list_that_is_too_long_for_the_server_is_reported_as_such():
    """`on_deadlock="raise"` warns then, and only then."""
    sent = problems.document(problems.problem_for(ListingTooLong("more than 46,000 claims are live", engine="redis")))
    received = wire.error_from_problem(sent, "http")
    assert isinstance(received, ListingTooLong)
    assert "46,000" in str(received)
    assert (
        type(wire.error_from_problem(problems.document(problems.problem_for(Unavailable("x"))), "http")) is Unavailable
    )


@pytest.mark.parametrize("more", ["a", ["a"], [1, 1], ["a", "b"], {}, ["a" * 300, 1]])
def test_cursor_of_another_shape_is_malformed(more):
    with pytest.raises(wire.Malformed):
        wire.page_from_json({"value": [], "more": more})


@pytest.mark.extended
def test_longest_list_takes_less_than_32_mebibytes():
    given = wire.encode(wire.holding_to_json(SHORTEST))
    body = b'[{"value":[' + b",".join([given] * (MAX_BODY // (len(given) + 1) - 1)) + b"]}]"
    tracemalloc.start()
    try:
        found = []
        for _ in range(probe_remote.MAX_PAGES):
            received = bytes(bytearray(body))
            found += wire.page_from_json(wire.decode(received)[0])[0]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 32 * 2**20
