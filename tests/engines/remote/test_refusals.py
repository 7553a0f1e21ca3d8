"""Tokens that a fence refused to a client are shown by its lock server, and the refused caller never waits for that."""

import asyncio
import json
import logging
import time
from urllib.parse import urlencode
from urllib.request import urlopen
from uuid import uuid4

import pytest

from harness.rigs.remote import over_memory
from leasehold import AsyncClient, Client, StaleToken
from leasehold.engines.remote import refusals
from leasehold.fences import Local
from tests.support.scripted_server import HANG_UP, SILENT, free_engine, problem
from tests.support.timing import check_elapsed

NAME = "orders/\N{RIGHT-TO-LEFT OVERRIDE}42"
RESOURCE = "ledger\nof 2026"


def send_old_token(lease):
    """To a fence that has seen the next one."""
    fence = Local(RESOURCE, 0)
    fence.claim(lease.token + 1)
    with pytest.raises(StaleToken):
        fence.write(lease, 1)
    return lease.token


def refuse_blocking(url, namespace):
    with Client(url, namespace=namespace, holder="settler") as client, client.lock(NAME, ttl=60) as lease:
        return send_old_token(lease)


def refuse_in_loop(url, namespace):
    async def run():
        client = AsyncClient(url, namespace=namespace, holder="settler")
        async with client, client.lock(NAME, ttl=60) as lease:
            return send_old_token(lease)

    return asyncio.run(run())


@pytest.mark.parametrize("refuse", [refuse_blocking, refuse_in_loop])
def test_refused_token_is_shown_by_the_server_of_its_client(refuse, wait_until):
    base, namespace = f"http://127.0.0.1:{over_memory()[0].port}", uuid4().hex

    def get(path, **query):
        with urlopen(f"{base}{path}?{urlencode({'namespace': namespace, **query})}") as answer:
            return answer.read().decode()

    token = refuse(base, namespace)
    wait_until(lambda: json.loads(get("/v1/history", name=NAME))["grants"][0]["refused"])
    (grant,) = json.loads(get("/v1/history", name=NAME))["grants"]
    assert (grant["token"], grant["holder"]) == (token, "settler")
    assert [each[1:] for each in grant["refused"]] == [["local", token + 1]]
    (incident,) = json.loads(get("/v1/incidents"))["incidents"]
    assert (incident["kind"], incident["reason"]) == ("stale_token", "ledger\\nof 2026")
    assert "REFUSED" in get("/lock", name=NAME)


@pytest.mark.parametrize("answer", [SILENT, HANG_UP, problem("invalid", 422), problem("overloaded", done=False)])
def test_report_without_an_answer_is_dropped_without_a_wait(driver, start_server, wait_until, caplog, answer):
    server = start_server(lambda call: answer if call["do"] == "report" else free_engine(call))
    driver.open(server, call_timeout=0.5)
    reports = driver.registry.shared["remote"].refusals
    stale = StaleToken("ledger", token=7, highest=9)
    with caplog.at_level(logging.WARNING, "leasehold.remote"):
        began = time.monotonic()
        for _ in range(3):
            driver.registry.report_refusal(driver.claim(), 7, stale, "local")
        check_elapsed(began, 0.2, "three reports, none of them waited for")
        wait_until(lambda: reports.dropped == 3 and "not reported to the lock server" in caplog.text)
    assert driver.attempt(driver.claim()).token == 7, "the client goes on"


def test_reports_are_bounded_and_hold_up_a_close_only_briefly(driver, start_server, wait_until):
    server = start_server(lambda call: SILENT if call["do"] == "report" else free_engine(call))
    driver.open(server, call_timeout=100.0)
    reports = driver.registry.shared["remote"].refusals
    for _ in range(refusals.MAX_REPORTS + 50):
        driver.registry.report_refusal(driver.claim(), 7, StaleToken("ledger", token=7, highest=9), "sql")
    wait_until(lambda: server.verbs().count("report") == 1)
    assert 49 <= reports.dropped <= 50, "one may have left the queue meanwhile"
    driver.registry.closed = True
    began = time.monotonic()
    driver.run(driver.engine.close())
    check_elapsed(began, 2 * refusals.FLUSH_SECONDS)
    server.close()
    wait_until(lambda: reports.dropped == refusals.MAX_REPORTS + 50)


def test_report_never_has_the_secret_of_its_claim(driver, start_server, wait_until):
    server = start_server(free_engine)
    driver.open(server)
    claim = driver.claim()
    driver.registry.report_refusal(claim, 7, StaleToken("ledger", token=7, highest=0), "once")
    wait_until(lambda: "report" in server.verbs())
    (report,) = [call for call in server.calls if call["do"] == "report"]
    assert claim.id not in json.dumps(report)
    assert claim.id_hash not in json.dumps(report)
    assert "seen" not in report["refusal"], "a fence that lost its record has seen nothing"
