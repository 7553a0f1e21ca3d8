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
