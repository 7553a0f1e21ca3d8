"""Which server is asked, and what an answer, a refusal or silence means: the table in `servers.py`, line by line."""

import time
from contextlib import suppress

import pytest

from harness.servers.proxy import Proxy
from leasehold import tracing
from leasehold.core.timing import NEVER
from leasehold.engines.remote.servers import BEST_TRAITS, Call, Failover, Tries
from leasehold.errors import AccessDenied, Mismatch, NotSent, Unavailable, Unsupported
from leasehold.model import Alive, Gone, Grant
from leasehold.runtime.threads import Threads
from tests.support import probe_remote
from tests.support.scripted_server import HANG_UP, SILENT, Raw, free_engine, problem, response
from tests.support.slow_network import check_lease_is_kept
from tests.support.timing import check_elapsed

NOT_DONE = problem("draining", done=False)
NO_ENGINE = problem("engine-unavailable")


@pytest.fixture
def pair(start_server):
    return start_server(), start_server()


def refusing(answer):
    return lambda call: answer


def test_client_keeps_to_the_server_of_its_id(driver, pair):
    driver.open(*pair, at=1)
    for _ in range(3):
        driver.attempt(driver.claim())
    assert not pair[0].calls
    assert pair[1].verbs() == ["attempt"] * 3


@pytest.mark.parametrize("what", ["refused", "reset", "not http", "not json", "too few answers", "bad gateway"])
def test_call_goes_to_the_next_server_with_the_same_id(driver, pair, what):
    driver.open(*pair)
    if what == "refused":
        pair[0].close()
    else:
        pair[0].script = refusing(
            {
                "reset": HANG_UP,
                "not http": Raw(b"SSH-2.0\r\n"),
                "not json": response(200, "x"),
                "too few answers": response(200, []),
                "bad gateway": response(502, "<html>"),
            }[what]
        )
    claim = driver.claim()
    assert isinstance(driver.attempt(claim), Grant)
    assert [call["claim"]["id"] for call in (*pair[0].calls, *pair[1].calls)] == [claim.id] * (1 + len(pair[0].calls))
    assert driver.servers.current.index == 1, "the client moved"


@pytest.mark.extended  # a call has a second
def test_silent_server_is_left_after_its_share_of_the_deadline(driver, pair):
    driver.open(*pair)
    pair[0].script = refusing(SILENT)
    claim, began = driver.claim(), time.monotonic()
    assert isinstance(driver.attempt(claim, seconds=1.0), Grant)
    assert time.monotonic() - began >= 0.5
    check_elapsed(began, 1.0)
    assert pair[1].calls[0]["claim"]["id"] == claim.id
    assert driver.servers.current.index == 1


def test_server_that_has_not_asked_its_engine_is_left_at_once(driver, pair):
    driver.open(*pair)
    pair[0].script = refusing(NOT_DONE)
    for _ in range(3):  # more than once a second: the limit is for moves, not for calls
        assert isinstance(driver.attempt(driver.claim()), Grant)
    assert driver.servers.current.index == 1
    assert len(pair[0].calls) == 1


def test_refusal_by_all_servers_is_not_sent(driver, pair):
    driver.open(*pair)
    for server in pair:
        server.script = refusing(NOT_DONE)
    with pytest.raises(NotSent, match="draining"):
        driver.attempt(driver.claim())
    assert [len(server.calls) for server in pair] == [1, 1]


def test_refusal_after_silence_may_have_been_sent(driver, pair):
    """The first server may have carried the attempt out: its claim must be released."""
    driver.open(*pair)
    pair[0].script, pair[1].script = refusing(SILENT), refusing(NOT_DONE)
    with pytest.raises(Unavailable) as error:
        driver.attempt(driver.claim(), seconds=1.0)
    assert not isinstance(error.value, NotSent)


def test_no_server_reachable_is_not_sent(driver, pair):
    driver.open(*pair)
    for server in pair:
        server.close()
    with pytest.raises(NotSent, match="cannot be reached"):
        driver.attempt(driver.claim())


def test_server_without_its_engine_is_left_for_the_next(driver, pair):
    driver.open(*pair)
    pair[0].script = refusing(NO_ENGINE)
    assert isinstance(driver.attempt(driver.claim()), Grant)
    assert driver.servers.current.index == 1


def test_engine_that_answers_no_server_is_asked_again_once_a_second(driver, pair):
    driver.open(*pair)
    began = time.monotonic()
    for server in pair:
        server.script = refusing(NO_ENGINE)
    for _ in range(10):
        with pytest.raises(Unavailable):
            driver.attempt(driver.claim())
    moves = sum(len(server.calls) for server in pair) - 10
    assert 1 <= moves <= 2 + time.monotonic() - began


def test_renewal_with_a_problem_inside_is_asked_of_the_next_server(driver, pair):
    """Renewals pass the server's breaker, so they are never refused as a whole."""
    driver.open(*pair)
    pair[0].script = lambda call: {"renewed": [{"alive": [1.0, None]}, NO_ENGINE]}
    claims = [driver.claim(token=1), driver.claim(token=2)]
    assert driver.renew(*claims) == [Alive(30.0, None)] * 2
    assert driver.servers.current.index == 1


@pytest.mark.extended  # a call has a second
@pytest.mark.parametrize("other", ["closed", "silent"])
def test_renewal_keeps_a_partial_answer_if_no_server_has_a_better_one(driver, pair, other):
    driver.open(*pair)
    pair[0].script = lambda call: {"renewed": [{"alive": [1.0, None]}, NO_ENGINE, {"gone": "expired"}]}
    if other == "closed":
        pair[1].close()
    else:
        pair[1].script = refusing(SILENT)
    alive, unavailable, gone = driver.renew(*[driver.claim(token=n) for n in (1, 2, 3)], seconds=1.0)
    assert (alive, gone) == (Alive(1.0, None), Gone("expired"))
    assert isinstance(unavailable, Unavailable)


def test_renewal_that_is_not_permitted_does_not_move_the_client(driver, pair):
    """It would be refused at every server, once a second, and the stream would move each time."""
    driver.open(*pair)
    pair[0].script = lambda call: {"renewed": [{"alive": [1.0, None]}, problem("forbidden", 403)]}
    alive, refused = driver.renew(driver.claim(token=1), driver.claim(token=2))
    assert alive == Alive(1.0, None)
    assert isinstance(refused, Unavailable)
    assert driver.servers.current.index == 0
    assert not pair[1].calls


def test_release_repeated_after_a_lost_answer_is_not_known(driver, pair):
    driver.open(*pair)
    pair[0].script = refusing(HANG_UP)
    pair[1].script = refusing({"value": False})
    assert driver.release(driver.claim(token=1)) is None
    assert driver.release(driver.claim(token=1)) is False


def test_break_is_not_repeated_once_it_was_sent(driver, pair):
    driver.open(*pair)
    pair[0].script = refusing(HANG_UP)
    with pytest.raises(Unavailable) as error:
        driver.break_()
    assert not isinstance(error.value, NotSent)
    assert not pair[1].calls


@pytest.mark.parametrize("what", ["refused", "not done"])
def test_break_goes_to_the_next_server_if_it_was_not_carried_out(driver, pair, what):
    driver.open(*pair)
    if what == "refused":
        pair[0].close()
    else:
        pair[0].script = refusing(NOT_DONE)
    assert driver.break_() is True


@pytest.mark.parametrize(
    ("kind", "members", "error"),
    [
        ("mismatch", {"name": "job", "wanted": "lock", "found": "semaphore of 2"}, Mismatch),
        ("unsupported", {"missing": ["shared"]}, Unsupported),
        ("forbidden", {}, AccessDenied),
    ],
)
def test_error_of_the_server_is_raised_and_asked_of_no_other(driver, pair, kind, members, error):
    driver.open(*pair)
    pair[0].script = refusing(problem(kind, 422, **members))
    with pytest.raises(error) as raised:
        driver.attempt(driver.claim())
    assert not pair[1].calls
    if kind == "unsupported":
        assert raised.value.engine == "http"


def test_request_refused_as_a_whole_raises_the_problem(driver, pair):
    driver.open(*pair)
    pair[0].script = refusing(response(401, problem("unauthorized")["problem"]))
    with pytest.raises(AccessDenied, match=r"set \$LEASEHOLD_API_KEY, or name a file with api_key_file="):
        driver.attempt(driver.claim())


def test_waiter_retries_while_its_only_server_restarts(driver, start_server):
    server = start_server()
    driver.open(server)
    answers = [HANG_UP, NOT_DONE, HANG_UP]
    server.script = lambda call: answers.pop() if answers else free_engine(call)
    assert isinstance(driver.attempt(driver.claim(queue=True)), Grant)
    assert len({call["claim"]["id"] for call in server.calls}) == 1


def test_waiter_gives_up_when_its_wait_is_over(driver, start_server):
    server = start_server()
    driver.open(server)
    driver.ping()
    server.close()
    began = time.monotonic()
    claim = driver.claim(queue=True, wait_deadline=driver.runtime.now() + 0.2)
    with pytest.raises(Unavailable):
        driver.attempt(claim)
    check_elapsed(began, 2.0)


def test_call_to_the_only_server_is_repeated_once_if_the_link_breaks(driver, start_server):
    """The address may be that of a balancer."""
    server = start_server()
    driver.open(server)
    answers = [HANG_UP]
    server.script = lambda call: answers.pop() if answers else free_engine(call)
    assert isinstance(driver.attempt(driver.claim()), Grant)
    server.script = refusing(HANG_UP)
    before = len(server.calls)
    with pytest.raises(Unavailable):
        driver.attempt(driver.claim())
    assert len(server.calls) - before <= 3


def test_idle_connection_that_the_server_closed_costs_nothing(driver, start_server):
    server = start_server()
    driver.open(server)
    for _ in range(3):
        assert isinstance(driver.attempt(driver.claim()), Grant)
        server.hang_up()


def test_connections_are_used_again(driver, start_server, wait_until):
    server = start_server()
    driver.open(server)
    for _ in range(5):
        driver.attempt(driver.claim())
    wait_until(lambda: server.accepted == 2)  # one for calls, one for the stream


def test_connection_with_bytes_nobody_asked_for_is_not_used_again(driver, start_server):
    """The answer to a request would be taken for the answer to the next one."""
    server = start_server()
    driver.open(server)
    twice = response(200, [{"grant": [7, 30.0, None]}])
    server.script = refusing(Raw(twice + twice))
    with suppress(Unavailable):  # in blocking mode even the first answer is refused
        driver.attempt(driver.claim())
    server.script = lambda call: {"value": False}
    assert driver.release(driver.claim()) is False


def test_connection_is_closed_when_the_server_says_so(driver, start_server, wait_until):
    server = start_server()
    driver.open(server)
    server.script = refusing(response(200, [{"grant": [7, 30.0, None]}], "Connection: close\r\n"))
    for _ in range(3):
        assert isinstance(driver.attempt(driver.claim()), Grant)
    wait_until(lambda: server.accepted == 4)  # three for calls, one for the stream


def test_traits_are_the_best_until_a_server_has_answered(driver, start_server):
    server = start_server()
    driver.open(server)
    assert driver.engine.traits == BEST_TRAITS
    driver.ping()
    assert driver.engine.traits.survives == "restart"


@pytest.mark.parametrize(
    "answer", [{}, {"grant": [1]}, {"grant": ["x", 1, None]}, {"busy": 1}, {"problem": "x"}], ids=str
)
def test_answer_of_another_shape_is_no_answer(driver, start_server, answer):
    server = start_server(refusing(answer))
    driver.open(server)
    with pytest.raises(Unavailable):
        driver.attempt(driver.claim())
    (renewed,) = driver.renew(driver.claim(token=1))
    assert isinstance(renewed, Unavailable)


def test_time_that_the_caller_has_is_sent_along(driver, start_server):
    server = start_server()
    driver.open(server)
    driver.attempt(driver.claim(), seconds=8.0)
    head = next(head for head in server.heads if head.startswith("POST"))
    (within,) = [float(line.split(":")[1]) for line in head.splitlines() if line.startswith("Leasehold-Within")]
    assert 0 < within <= 8.0


TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("traceparent", "sent"),
    [(TRACEPARENT, True), (None, False), ("junk", False), (f"{TRACEPARENT}\r\nAuthorization: Bearer x", False)],
)
def test_request_within_a_trace_names_it(driver, pair, traceparent, sent):
    driver.open(*pair)
    token = tracing.current.set(traceparent)
    try:
        assert driver.attempt(driver.claim()).token  # the server understands it
    finally:
        tracing.current.reset(token)
    (head,) = [head for server in pair for head in server.heads if head.startswith("POST")]
    assert (f"traceparent: {TRACEPARENT}" in head.splitlines()) == sent
    assert "Authorization" not in head


def test_request_with_calls_of_two_traces_names_none(driver, pair):
    """A header would put the calls of one trace into the other. Each call has its own."""
    driver.open(*pair)
    calls = [{"do": "ping", "traceparent": f"00-{digit * 32}-{digit * 16}-01"} for digit in "12"]
    request = driver.servers.all[0].calls_request("client", calls, 5.0)
    assert b"traceparent:" not in request


@pytest.mark.faults
def test_slow_network_costs_no_lease(pair):
    proxies = [Proxy(server.port) for server in pair]
    try:
        check_lease_is_kept("http://" + ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies), proxies)
    finally:
        for proxy in proxies:
            proxy.close()


@pytest.mark.extended  # a call has a second
def test_slow_answer_makes_the_next_share_longer(driver, pair):
    driver.open(*pair)
    driver.servers.last_answer = 0.2
    pair[0].script = refusing(SILENT)
    began = time.monotonic()
    assert isinstance(driver.attempt(driver.claim(), seconds=1.0), Grant), "the other server still gets its turn"
    assert time.monotonic() - began >= 0.6
    assert driver.servers.last_answer < 0.2


@pytest.mark.extended  # a call has a second
def test_slow_server_behind_a_silent_one_has_its_turn_in_the_next_call(driver, pair):
    """After a slow answer the silent server gets nine tenths of a call, again and again if each call begins with it."""

    def slow(call):
        time.sleep(0.3)  # pause: a slow server
        return free_engine(call)

    driver.open(*pair)
    driver.servers.last_answer = 1.0
    pair[0].script, pair[1].script = refusing(SILENT), slow
    with pytest.raises(Unavailable):
        driver.attempt(driver.claim(), seconds=1.0)
    assert isinstance(driver.attempt(driver.claim(), seconds=60.0), Grant)
    assert len(pair[0].calls) == 1


def test_each_round_repeats_a_broken_connection_once() -> None:
    failover = Failover(None, None, Threads(), "http")
    tries = Tries(None, broke_before=True)
    call = Call({}, NEVER, retry_until=lambda: NEVER)
    assert probe_remote.begin_round(failover, call, tries)
    assert (tries.rounds, tries.broke_before, tries.tried) == (1, False, set())
