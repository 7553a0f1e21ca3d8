"""The audit log of a server: what is in it, and what happens if it cannot be written."""

import json
import os
import threading

import pytest

from leasehold.config import EngineConfig
from leasehold.server.app import App
from leasehold.server.audit import Audit
from leasehold.server.auth import Authenticator
from leasehold.server.limits import Limits
from leasehold.server.messages import Request
from leasehold.server.service import Service
from leasehold.server.settings import LimitSettings
from leasehold.telemetry.audit import AuditFile
from tests.support.running_server import SECONDS, in_loop, poll, running

NAME, ID, OTHER = "orders/42", "first-0123456789", "second-0123456789"


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_audit_log_says_who_was_granted_released_and_broke_what(tmp_path):
    path = tmp_path / "audit.jsonl"
    with running("--audit-file", str(path)) as server:
        headers = {"X-Request-Id": "request-7"}
        lease = server.post("/v1/acquire", {"name": NAME, "id": ID, "holder": "web-3", "ttl": 60}, headers=headers).json
        server.post("/v1/acquire", {"name": NAME, "id": OTHER})
        server.post("/v1/renew", {"name": NAME, "id": ID, "token": lease["token"], "ttl": 60})
        server.post("/v1/break", {"name": NAME, "token": lease["token"], "reason": "it hangs"})
        server.post("/v1/renew", {"name": NAME, "id": ID, "token": lease["token"], "ttl": 60})
        server.post("/v1/calls", [{"do": "attempt", "claim": {"name": NAME, "id": OTHER, "ttl": 60}}])
        server.post("/v1/release", {"name": NAME, "id": OTHER})
        assert server.post("/v1/limit", {"name": NAME, "limit": 2, "reason": "a slow disk"}).json == {"limit": 2}
        server.post("/v1/limit", {"name": NAME, "limit": None})
        output = server.output
    found = records(path)
    assert [each["action"] for each in found] == [
        *("open", "grant", "break", "loss", "grant", "release", "resize", "resize", "close")
    ]
    grant, break_ = found[1], found[2]
    assert grant["lock"]["name"] == NAME
    assert grant["who"] == {"subject": "anyone", "holder": "web-3"}
    assert (grant["token"], grant["fingerprint"]) == (lease["token"], lease["fingerprint"])
    assert grant["request"] == "request-7"
    assert break_["why"] == "it hangs"
    resize = found[-3]
    assert (resize["lock"]["limit"], resize["why"], resize["who"]["subject"]) == (2, "a slow disk", "anyone")
    assert "limit" not in found[-2]["lock"]
    for secret in (ID, OTHER):
        assert secret not in path.read_text() + output
    assert os.stat(path).st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/acquire", {"name": NAME, "id": ID}),
        ("/v1/calls", [{"do": "attempt", "claim": {"name": NAME, "id": ID, "ttl": 60}}]),
    ],
)
@in_loop
async def test_record_is_in_the_file_before_the_answer_leaves(tmp_path, path, body):
    """A server that was killed had answered grants that its audit log did not have."""

    async def read_body():
        return json.dumps(body).encode()

    service = Service(EngineConfig.parse("memory://", 60.0))
    with AuditFile(tmp_path / "audit.jsonl") as file:
        app = App(service, Authenticator(None), Limits(LimitSettings()), Audit(file, required=False))
        await service.start()
        try:
            answer = await app.answer(Request("POST", path, read_body=read_body))
            assert (answer.status, b"token" in answer.body or b"grant" in answer.body) == (200, True)
            assert [each["action"] for each in records(tmp_path / "audit.jsonl")] == ["open", "grant"]
        finally:
            await service.stop()


def test_denied_requests_are_in_the_audit_log(tmp_path):
    from datetime import UTC, datetime

    from leasehold.server import keys

    path, key_file = tmp_path / "audit.jsonl", tmp_path / "keys.toml"
    key = keys.create(key_file, "web", [keys.Right.parse("lock::orders/")], now=datetime.now(UTC))
    with running("--audit-file", str(path), "--keys", str(key_file)) as server:
        lease = {"name": "secrets/1", "id": ID, "token": 7}
        assert server.post("/v1/acquire", {"name": "secrets/1", "id": ID}, key=key).status == 403
        assert server.post("/v1/renew-many", {"leases": [lease]}, key=key).json["leases"][0]["status"] == 403
        server.post("/v1/calls", [{"do": "renew", "claims": [{**lease, "ttl": 30}]}], key=key)
        assert server.get("/lock?name=secrets/1", key=key).status == 403
        assert server.get("/v1/locks?namespace=shop&prefix=secrets/", key=key).status == 403
    denied = [each for each in records(path) if each["action"] == "denied"]
    assert {each["who"]["subject"] for each in denied} == {"web"}
    assert [each["result"] for each in denied] == ["/v1/acquire", "/v1/renew-many", "/v1/calls", "/lock", "/v1/locks"]
    assert [each["lock"]["name"] for each in denied] == ["secrets/1"] * 4 + ["secrets/"]
    assert denied[-1]["lock"]["namespace"] == "shop"


@pytest.mark.parametrize("required", [True, False])
def test_audit_log_that_cannot_be_written_stops_grants_if_required(tmp_path, required):
    folder = tmp_path / "audit"
    folder.mkdir()
    path = folder / "audit.jsonl"
    arguments = ["--audit-file", str(path), *(["--audit-required"] if required else [])]
    with running(*arguments) as server:
        lease = server.post("/v1/acquire", {"name": NAME, "id": ID, "ttl": 60}).json
        poll(lambda: len(records(path)) == 2)
        path.rename(folder / "moved.jsonl")
        path.mkdir()  # nothing can be written there
        server.post("/v1/release", {"name": "other", "id": ID})
        assert server.post("/v1/acquire", {"name": "noticed", "id": ID}).status == 200  # its record fails
        answer = server.post("/v1/acquire", {"name": "next", "id": ID})
        if required:
            assert (answer.status, answer.kind, answer.json["done"]) == (503, "overloaded", False)
        else:
            assert answer.status == 200
        renewal = {"name": NAME, "id": ID, "token": lease["token"]}
        assert server.post("/v1/renew", renewal).status == 200
        assert server.post("/v1/release", {"name": NAME, "id": ID}).json == {"released": True}
        path.rmdir()
        assert poll(lambda: server.post("/v1/acquire", {"name": "again", "id": ID}).status == 200)


@pytest.mark.parametrize("breaks", ["before it is woken", "before it asks"])
def test_waiting_request_is_not_granted_once_the_log_cannot_be_written(tmp_path, breaks):
    """A long-poll that had begun earlier was granted the name without a record."""
    folder = tmp_path / "audit"
    folder.mkdir()
    path = folder / "audit.jsonl"
    with running("--audit-file", str(path), "--audit-required") as server:
        server.post("/v1/acquire", {"name": NAME, "id": ID, "ttl": 60})
        answers = []
        body = {"name": NAME, "id": OTHER, "wait": 50}
        waiting = threading.Thread(target=lambda: answers.append(server.post("/v1/acquire", body)))

        def stop_writing():
            path.rename(folder / "moved.jsonl")
            path.mkdir()
            assert server.post("/v1/acquire", {"name": "noticed", "id": ID}).status == 200  # its record fails

        if breaks == "before it asks":
            stop_writing()
        waiting.start()
        if breaks == "before it is woken":
            poll(lambda: len(server.get(f"/v1/locks?name={NAME}").json["holdings"][0]["queue"]) == 1)
            stop_writing()
        server.post("/v1/release", {"name": NAME, "id": ID})
        waiting.join(SECONDS)
        (answer,) = answers
        assert (answer.status, answer.kind) == (503, "overloaded")
        path.rmdir()
        assert poll(lambda: server.post("/v1/acquire", {"name": NAME, "id": OTHER}).status == 200)
