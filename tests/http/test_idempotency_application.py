"""`Idempotency-Key`: applications that raise, do not respond, or would send past the middleware."""

import pytest

from leasehold import ConfigError, LeaseLost, Mismatch, NotAcquired, RunFailed, StaleToken, Unavailable


def test_exception_of_application_is_raised_each_time(http):
    async def broken(scope, receive, send):
        raise ValueError("no paper")

    async def work(app, _):
        for _ in range(2):
            with pytest.raises(ValueError, match="no paper"):
                await http.post(app)

    http.served(work, broken)


def download(sent: list[bytes], hang_up_after: int = 10**9):
    """An application whose answer is long, and a sender of requests that disconnects at some time."""
    runs, most_kept = [], [0]

    async def app(scope, receive, send):
        runs.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(1, 1001):
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": number < 1000})
            most_kept[0] = max(most_kept[0], 1000 * number - sum(map(len, sent)))

    async def call(app, key=b"k1"):
        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            if len(sent) >= hang_up_after:
                raise OSError("the sender is gone")
            sent.append(message.get("body", b""))

        headers = [(b"idempotency-key", key)]
        await app({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive, send)

    return app, call, runs, most_kept


def test_answer_that_is_too_large_to_be_stored_is_not_kept_in_memory(http):
    """A sender could make the middleware keep an answer without end: it decides whether there is a key."""
    sent = []
    app, call, _, most_kept = download(sent)
    http.served(lambda wrapped, _: call(wrapped), app, max_answer=5000)
    assert sum(map(len, sent)) == 1_000_000
    assert most_kept[0] <= 5000


def test_request_is_not_repeated_if_its_answer_does_not_fit_a_record(http):
    async def work(app, shop):
        answers = [await http.post(app) for _ in range(2)]
        assert [status for status, *_ in answers] == [201, 409]
        assert b"too large to be stored" in answers[1][2]
        assert len(shop.orders) == 1

    http.served(work, http.Shop(body=b"x" * 6_100_000), max_answer=7_000_000)


def test_request_is_not_repeated_if_sender_hung_up_in_a_large_answer(http):
    sent = []
    app, call, runs, _ = download(sent, hang_up_after=20)

    async def work(wrapped, _):
        await call(wrapped)
        status, _, body = await http.post(wrapped, b"", path="/")
        assert (status, b"too large to be stored" in body) == (409, True)

    http.served(work, app, max_answer=5000)
    assert len(runs) == 1


def test_answer_that_was_cut_short_is_not_replayed_as_a_whole(http):
    """Starlette ends a streamed answer when its sender disconnects, and returns as if it were complete."""
    runs, messages = [], []

    async def stream(scope, receive, send):
        runs.append(await receive())
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"half a rec", "more_body": True})
        if (await receive())["type"] != "http.disconnect":
            await send({"type": "http.response.body", "body": b"eipt"})

    async def work(app, _):
        scope = {"type": "http", "method": "POST", "path": "/orders", "headers": [(b"idempotency-key", b"k1")]}
        received = [{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}]

        async def receive():
            return received.pop(0)

        async def send(message):
            messages.append(message)

        await app(scope, receive, send)
        status, headers, body = await http.post(app, b"{}")
        assert (status, b"cut short" in body, b"idempotency-replayed" in headers) == (409, True, False)

    http.served(work, stream)
    assert len(runs) == 1, "a part of the request may have been carried out"
    assert messages[-1]["more_body"], "the server must not end the answer as if it were complete"


@pytest.mark.parametrize("error", [OSError("no mail today"), NotAcquired("mail")], ids=["foreign", "own"])
def test_request_is_not_repeated_if_what_follows_the_answer_fails(http, error):
    """Such as a background task: the order is taken, and the sender is told so."""
    runs = []

    async def shop(scope, receive, send):
        runs.append(await receive())
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"ordered"})
        raise error

    async def work(app, _):
        messages = []

        async def receive():
            return {"type": "http.request", "body": b"{}"}

        async def send(message):
            messages.append(message)

        scope = {"type": "http", "method": "POST", "path": "/orders", "headers": [(b"idempotency-key", b"k1")]}
        with pytest.raises(type(error)) as raised:
            await app(scope, receive, send)
        assert raised.value is error
        assert [messages[0]["status"], messages[1]["body"]] == [201, b"ordered"]
        status, headers, body = await http.post(app)
        assert (status, headers[b"idempotency-replayed"], body) == (201, b"true", b"ordered")

    http.served(work, shop)
    assert len(runs) == 1


def test_application_without_response_is_runtime_error(http):
    async def mute(scope, receive, send):
        pass

    async def work(app, _):
        with pytest.raises(RuntimeError, match="without a response"):
            await http.post(app)

    http.served(work, mute)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("the application's own"),
        NotAcquired("stock"),
        LeaseLost("stock"),
        Mismatch("stock", wanted="lock", found="semaphore of 3"),
        RunFailed("mail", error="no"),
        StaleToken("ledger", token=1, highest=2),
        Unavailable("the application's engine is silent"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_leasehold_error_raised_by_application_is_passed_through(http, error):
    """An application may use locks itself: an error that it raises is a crash, not an answer about the key."""

    async def app(scope, receive, send):
        raise error

    async def work(app, _):
        for _ in range(2):  # the request may be sent again
            with pytest.raises(type(error)) as raised:
                await http.post(app)
            assert raised.value is error

    http.served(work, app)


def test_response_extensions_are_hidden_from_application(http):
    """Servers offer to send files themselves. Such a response could neither be held back nor stored."""

    async def app(scope, receive, send):
        offered.append(sorted(scope["extensions"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if "http.response.pathsend" in scope["extensions"]:
            await send({"type": "http.response.pathsend", "path": "/etc/hostname"})
        else:
            await send({"type": "http.response.body", "body": b"the file"})

    async def work(app, _):
        extensions = {"tls": {}, "http.response.pathsend": {}, "http.response.trailers": {}}
        for _ in range(2):
            status, _, body = await http.post(app, scope={"extensions": extensions})
            assert (status, body) == (200, b"the file")

    offered: list[list[str]] = []
    http.served(work, app)
    assert offered == [["tls"]]
