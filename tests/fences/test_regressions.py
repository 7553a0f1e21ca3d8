"""Attacks on the rules, files and stores: odd passes, planted tokens, forks during a write, servers that lie."""

from __future__ import annotations

import itertools
import json
import os
import socketserver
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leasehold import ConfigError, StaleToken, Unavailable, fences
from leasehold.fences import TokenInfo
from leasehold.http.headers import parse_stale_problem

# -------------------------------------------------------------------------- tokens and slots


@pytest.mark.parametrize("token", [5.0, 5.5, float("nan"), "5", None, True, b"5", 2**53, 0, -3])
@pytest.mark.parametrize(
    "bearer", [lambda token: token, TokenInfo, lambda token: SimpleNamespace(token=token, slot=None, shared=False)]
)
def test_fence_refuses_token_that_is_not_a_valid_int(token, bearer, tmp_path):
    """A float would pass the comparison and be truncated or rounded later."""
    local, file = fences.Local("a", 0), fences.File(tmp_path / "a")
    for call in (lambda: local.write(bearer(token), 1), lambda: file.write(bearer(token), "1")):
        with pytest.raises(ConfigError):
            call()
    assert local.peek() == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("slot", [-1, -2, 2**31, True, 1.0, "0", "a/../b"])
def test_fence_refuses_invalid_slot(slot, resource, tmp_path):
    """-1 means the lock itself in a fence row, and an offset before the start of a token file."""
    number = resource("sqlite-row")
    number.write(9, 1)
    for fence in (number, fences.File(tmp_path / "a")):
        with pytest.raises(ConfigError, match="slot"):
            fence.write(TokenInfo(10, slot=slot), 2 if fence is number else "2")
    assert number.peek() == 1
    number.write(9, 3)


@pytest.mark.parametrize("shared", [0, 1, None, "", "no", "0"])
def test_fence_refuses_shared_that_is_not_a_bool(shared):
    """An empty text from a message would make a reader's token that of a writer."""
    with pytest.raises(ConfigError, match="shared must be True or False"):
        fences.Local("a", 0).write(TokenInfo(5, shared=shared), 1)


@pytest.mark.parametrize("name", ["\ud800", "a\udcff"])
def test_fence_refuses_resource_name_that_cannot_be_encoded(name):
    with pytest.raises(ConfigError):
        fences.Local(name, 0)


# ------------------------------------------------------------------------------------ files

FORKER = """
import os, sys, time
from leasehold.fences import File
fence = File(sys.argv[1])
real = fence._replace
def forking(body):
    if os.fork() == 0:  # what a thread of a prefork server does while another is in here
        time.sleep(60)
        os._exit(0)
    real(body)
fence._replace = forking
fence.write(5, "x")
print("written", flush=True)
sys.stdin.readline()
"""


def test_child_forked_during_file_write_does_not_keep_the_flock(tmp_path):
    """The child inherits the descriptor, and with it the flock."""
    command = [sys.executable, "-c", FORKER, str(tmp_path / "a")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "written\n"
            fences.File(tmp_path / "a", wait=2).write(6, "y")
        finally:
            os.killpg(parent.pid, 9)


def test_file_write_does_not_write_through_leftover_hard_link(tmp_path):
    """The leftover may be a hard link that a backup made."""
    (tmp_path / "backup").write_text("precious")
    os.link(tmp_path / "backup", tmp_path / ".a.new")
    fences.File(tmp_path / "a").write(5, "x")
    assert (tmp_path / "backup").read_text() == "precious"
    assert (tmp_path / "a").read_text() == "x"


def test_private_file_is_never_readable_by_others_during_write(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("secret")
    (tmp_path / "a").chmod(0o600)
    modes, real = [], os.fchmod

    def fchmod(fd: int, mode: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        real(fd, mode)

    monkeypatch.setattr(os, "fchmod", fchmod)
    fences.File(tmp_path / "a").write(5, "more secret")
    assert modes == [0o600], "a process that opened it before fchmod could read what is written later"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_file_keeps_its_owner(tmp_path):
    (tmp_path / "a").write_text("theirs")
    os.chown(tmp_path / "a", 12345, 23456)
    fences.File(tmp_path / "a").write(5, "x")
    found = (tmp_path / "a").stat()
    assert (found.st_uid, found.st_gid) == (12345, 23456)


def test_file_write_of_wrong_type_leaves_no_file(tmp_path):
    for bad in (7, None, ["a"]):
        with pytest.raises(TypeError):
            fences.File(tmp_path / "a").write(5, bad)
    assert os.listdir(tmp_path) == []


def crash_after(path: Path, steps_left: int) -> tuple[bool, list[str]]:
    """Run a child that writes and dies after `steps_left` steps. Return whether it died, and the steps it took."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:

        def counted(name: str, real: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal steps_left
                result = real(*args, **kwargs)
                os.write(writer, f"{name} ".encode())
                steps_left -= 1
                if steps_left == 0:
                    os.kill(os.getpid(), 9)
                return result

            return call

        try:
            for name in ("open", "pwrite", "unlink", "fchown", "fchmod", "fsync", "replace", "close"):
                setattr(os, name, counted(name, getattr(os, name)))
            fences.File(path).write(5, "new")
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as output:
        steps = output.read().split()
    return os.waitpid(pid, 0)[1] == 9, steps


def test_file_crash_after_any_step_never_leaves_new_content_unfenced(tmp_path):
    path, steps, died = tmp_path / "a", [], True
    for step in itertools.count(1):
        for name in os.listdir(tmp_path):
            os.remove(tmp_path / name)
        fences.File(path).write(1, "old")
        died, steps = crash_after(path, step)
        if not died:
            break
        assert len(steps) == step
        assert path.read_text() in ("old", "new")
        if path.read_text() == "new" or "pwrite" in steps:
            with pytest.raises(StaleToken):
                fences.File(path).write(4, "stale")
        fences.File(path, wait=5).write(5, "newer")
        assert path.read_text() == "newer"
    # A power cut can only undo later steps: first the token, then the content, then the name are synced to disk.
    order = [step for step in steps if step in ("pwrite", "fsync", "replace")]
    assert order == ["pwrite", "fsync", "fsync", "replace", "fsync"]


# ------------------------------------------------------------------- invalid token records


@pytest.mark.parametrize("highest_token", ["garbage", "-1", "1e3", "", "\u0667", "0x9", "9" * 16])
@pytest.mark.parametrize("kind", ["redis", "zookeeper", "etcd", "object-in-metadata"])
def test_corrupt_highest_token_lets_no_write_through(kind, highest_token, resource):
    import redis

    number = resource(kind)
    number.write(9, 1)
    read_value = number.peek if kind != "object-in-metadata" else lambda: int(number.store.get(number.key).body)
    corrupt = {
        "redis": lambda: number.client.set(fences.redis.default_token_key(number.key), highest_token),
        "zookeeper": lambda: number.client.set(f"{number.path}.fence", highest_token.encode()),
        "etcd": lambda: number.tool("put", f"{number.key}.fence", "--", highest_token),
        "object-in-metadata": lambda: replace_metadata_token(number, highest_token),
    }
    corrupt[kind]()
    with pytest.raises((ConfigError, redis.ResponseError)):
        number.write(5, 2)
    assert read_value() == 1


@pytest.mark.parametrize("kind", ["redis", "zookeeper", "etcd"])
def test_fence_refuses_to_keep_highest_token_in_the_value_itself(kind, resource):
    number = resource(kind)
    constructors = {
        "redis": lambda: fences.RedisFence(number.client, "a", token_key="a"),
        "zookeeper": lambda: fences.ZooKeeperFence(number.client, "/a", token_path="/a"),
        "etcd": lambda: fences.EtcdFence("http://127.0.0.1", "/a", token_key="/a"),
    }
    with pytest.raises(ConfigError, match="itself"):
        constructors[kind]()


def test_redis_fence_refuses_a_pipeline_as_client(resource):
    """A pipeline does not execute: iterating over its reply would never end."""
    number = resource("redis")
    pipeline = number.client.pipeline()
    with pytest.raises(ConfigError, match="pipeline"):
        fences.RedisFence(pipeline, number.key).write(5, "1")
    pipeline.reset()
    assert number.peek() == 0


def replace_metadata_token(number: Any, highest_token: str) -> None:
    stored = number.store.get(number.key)
    assert number.store.put(
        number.key,
        stored.body,
        {**stored.metadata, "lease-token": highest_token.encode().decode("latin-1")},
        stored.etag,
    )


def test_object_with_invalid_fence_header_is_refused(resource):
    number = resource("object")
    stored = number.store.get(number.key)
    for head in (
        b"leasehold-fence and so on",
        b"leasehold-fence {}\n",
        b'leasehold-fence {"absent": 0, "highest_tokens": {"": "x"}}\n',
    ):
        assert number.store.put(number.key, head, {}, stored.etag)
        with pytest.raises(ConfigError, match="first line is not valid"):
            number.write(5, 1)
        stored = number.store.get(number.key)
        assert stored.body == head


# ------------------------------------------------------------------------- servers that lie


@contextmanager
def serve_response(*, status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None) -> Iterator[Any]:
    """A server that gives every request the same response and records the requests in `.asked`."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.asked.append((self.command, self.path, dict(self.headers)))  # type: ignore[attr-defined]
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body if self.command != "HEAD" else b"")

        do_GET = do_PUT = do_POST = do_HEAD = answer

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked = []  # type: ignore[attr-defined]
        server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def test_object_store_without_etags_is_refused():
    """An empty `If-Match` is no condition: every write would be accepted."""
    with serve_response(body=b"0") as store:
        with pytest.raises(ConfigError, match="ETag"):
            fences.ObjectFence(fences.HTTPObjects(store.url), "a").write(5, "1")
        assert [method for method, _, _ in store.asked] == ["GET"]


def test_redirect_is_not_followed_with_credentials():
    with (
        serve_response(body=b"7", headers={"ETag": '"1"'}) as target,
        serve_response(status=302, headers={"Location": target.url}) as redirecting,
    ):
        secret = {"Authorization": "Basic c2VjcmV0"}
        for call in (
            lambda: fences.HTTPFence(redirecting.url, headers=secret).read(5),
            lambda: fences.ObjectFence(fences.HTTPObjects(redirecting.url, headers=secret), "a").read(5),
            lambda: fences.EtcdFence(redirecting.url, "a", headers=secret).read(5),
        ):
            with pytest.raises((OSError, ConfigError, Unavailable)) as refused:
                call()
            assert "c2VjcmV0" not in str(refused.value)
        assert target.asked == []


def test_http_reads_ask_caches_not_to_answer():
    """A cached response raises no token."""
    with serve_response(body=b"7", headers={"ETag": '"1"'}) as server:
        fences.HTTPFence(server.url).read(5)
        fences.HTTPObjects(server.url).get("a")
        assert [headers.get("Cache-Control") for _, _, headers in server.asked] == ["no-cache", "no-cache"]


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b"{}", b'{"succeeded": true}', b'{"responses": [7]}', b"[" * 100_000]
)
def test_invalid_etcd_response_is_unavailable(body):
    with serve_response(body=body) as server, pytest.raises(Unavailable):
        fences.EtcdFence(server.url, "a").read(5)


def test_truncated_etcd_response_is_unavailable():
    class TruncatingHandler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65_536)
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}")

    with socketserver.TCPServer(("127.0.0.1", 0), TruncatingHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(Unavailable):
            fences.EtcdFence(f"http://127.0.0.1:{server.server_address[1]}/", "a").write(5, "x")


@pytest.mark.parametrize(
    "more",
    [
        *({"token": 1e999}, {"token": "x"}, {"token": True}, {"token": 1.0}, {"token": 0}, {"token": 2}),
        *({"highest": None}, {"highest": 2**53}, {"slot": []}, {"slot": 1e999}, {"slot": -1}, {"resource": None}),
    ],
)
def test_stale_problem_with_invalid_fields_is_not_parsed(more):
    document = {"type": "urn:leasehold:stale-token", "resource": "a", "token": 1, "highest": 2}
    assert isinstance(parse_stale_problem(document), StaleToken)
    assert parse_stale_problem(json.loads(json.dumps({**document, **more}))) is None
