"""Behaviour specific to object stores."""

from __future__ import annotations

import pytest

from leasehold import ConfigError, StaleToken, Unavailable, fences
from tests.support import probe_fences
from tests.support.fixed_response import serve_response


def test_object_fence_on_missing_object(resource):
    number = resource("object")
    for in_metadata, etags in ((False, "hash"), (True, "version")):
        store = fences.HTTPObjects(f"http://127.0.0.1:{number.spec['objects']}/{etags}")
        fence = fences.ObjectFence(store, f"new ö/{number.spec['run']}", in_metadata=in_metadata)
        assert fence.peek() is None
        with pytest.raises(FileNotFoundError):
            fence.read(5)
        with pytest.raises(StaleToken):
            fence.write(4, "too old: a read of nothing is a read")
        assert fence.peek() is None
        fence.write(5, "")
        assert fence.peek() == fence.read(6) == b""
        fence.write(6, b"\x00\n\xff")
        fence.write(6, b"\x00\n\xff")
        assert fence.read(7) == b"\x00\n\xff"


def test_object_write_keeps_other_metadata(resource):
    for kind in ("object", "object-in-metadata"):
        number = resource(kind)
        number.write(5, 1)
        stored = number.store.get(number.key)
        assert stored is not None
        assert stored.metadata["colour"] == "blue"


def test_object_fence_refuses_metadata_token_with_content_etag(resource):
    """If the ETag does not change with the metadata, an older If-Match still matches. Hence the default."""
    number = resource("object")
    fence = fences.ObjectFence(number.store, number.key, in_metadata=True)
    before = number.store.get(number.key)
    with pytest.raises(ConfigError, match="needs in_metadata=False"):
        fence.claim(9)
    # What this guards against: a write with token 5 that is compared before 9 is claimed and applied after it.
    assert before is not None
    assert number.store.put(number.key, b"stale", {"lease-token": "5"}, before.etag) is not None


def test_object_write_is_refused_when_newer_token_came_before_put(resource):
    number = resource("object")
    number.write(5, 1)
    store, real_put = number.store, number.store.put
    other = fences.ObjectFence(fences.HTTPObjects(probe_fences.url_of(store)), number.key)

    def put(*args):
        store.put = real_put
        other.write(9, "2")
        return real_put(*args)

    store.put = put
    with pytest.raises(StaleToken):
        number.write(6, 3)
    assert number.peek() == 2


def test_object_store_with_endless_conflicts_is_unavailable():
    class ConflictingStore:
        def get(self, key):
            return None

        def put(self, key, body, metadata, match):
            return None

    with pytest.raises(Unavailable, match="changed by other clients during each"):
        fences.ObjectFence(ConflictingStore(), "a").write(5, "x")
    with pytest.raises(ConfigError):
        fences.HTTPObjects("ftp://a")


def test_object_store_without_etags_is_refused():
    """An empty `If-Match` is no condition: every write would be accepted."""
    with serve_response(body=b"0") as store:
        with pytest.raises(ConfigError, match="ETag"):
            fences.ObjectFence(fences.HTTPObjects(store.url), "a").write(5, "1")
        assert [method for method, _, _ in store.asked] == ["GET"]
