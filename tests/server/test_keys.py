"""The file of API keys: what is in it, who may write it, and writers at the same time."""

import hashlib
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import pytest

from leasehold.errors import ConfigError
from leasehold.server import keys
from leasehold.server.keys import Right

NOW = datetime(2030, 1, 31, 12, 0, tzinfo=UTC)
RIGHT = Right.parse("lock,read:shop:orders/")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.toml"


def test_new_key_is_stored_as_hash_for_owner_only(path):
    key = keys.create(path, "web", [RIGHT], now=NOW)
    assert key.startswith("lh_web_")
    assert len(key.removeprefix("lh_web_")) == 64
    text = path.read_text()
    assert key not in text
    assert key[-64:] not in text
    assert hashlib.sha256(key.encode()).hexdigest() in text
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path], "nothing else is left"


@pytest.mark.parametrize("prefix", ["", "orders/", "a:b", 'quo"te', "back\\slash", "\x7f\n\t\u2028", "日本", "🔒"])
@pytest.mark.parametrize("namespace", ["", "shop", "*", 'n"\n'])
def test_entry_is_read_as_it_was_written(path, namespace, prefix):
    rights = [Right.make(["lock"], namespace, prefix), Right.make(["read", "break"], "other", "x")]
    expires = NOW + timedelta(days=90)
    keys.create(path, "web", rights, now=NOW, expires=expires)
    (found,) = keys.read(path).values()
    assert (found.who, found.created, found.expires, found.allow) == ("web", NOW, expires, tuple(rights))


@pytest.mark.parametrize("who", ["web", "web_2", "a.b-c_", "0", "x" * 64])
def test_who_is_found_in_its_key(path, who):
    key = keys.create(path, who, [RIGHT], now=NOW)
    assert keys.who_of(key.encode()) == who


@pytest.mark.parametrize("who", ["", "-x", "_x", "a b", "a/b", "ä", "x" * 65, "a\n", "a:b"])
def test_who_with_other_characters_is_refused(path, who):
    with pytest.raises(ConfigError, match="WHO must be 1 to 64 letters"):
        keys.create(path, who, [RIGHT], now=NOW)
    assert not path.exists()


def test_certificate_entry_has_no_key(path):
    assert keys.create(path, "spiffe://shop/web", [RIGHT], now=NOW, certificate=True) is None
    assert keys.read(path)["spiffe://shop/web"].sha256 is None


@pytest.mark.parametrize(
    "text", ["", "lock", "lock:", "lock:shop", "write:shop:", ":shop:", "lock,,read::", "LOCK::", "lock::a\0b"]
)
def test_malformed_right_is_refused(text):
    with pytest.raises(ConfigError, match=r"VERBS:NAMESPACE:PREFIX|verbs of a right are read, lock, break|NUL"):
        Right.parse(text)


def test_second_key_of_same_caller_is_refused_with_advice(path):
    keys.create(path, "web", [RIGHT], now=NOW)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"web has a key .* such as web-2"):
        keys.create(path, "web", [RIGHT], now=NOW)
    assert path.read_bytes() == before


def test_revoke_removes_one_entry(path):
    keys.create(path, "web", [RIGHT], now=NOW)
    keys.create(path, "cron", [RIGHT], now=NOW)
    keys.revoke(path, "web")
    assert list(keys.read(path)) == ["cron"]


def test_revoke_of_unknown_caller_names_a_similar_one(path):
    keys.create(path, "web-front", [RIGHT], now=NOW)
    with pytest.raises(ConfigError, match=r"has no key of 'web-frnt' \(did you mean web-front\?\)"):
        keys.revoke(path, "web-frnt")
    with pytest.raises(ConfigError, match="does not exist"):
        keys.revoke(path.with_name("other"), "web")


def test_symbolic_link_is_not_written_through(path, tmp_path):
    keys.create(path, "web", [RIGHT], now=NOW)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="symbolic link"):
        keys.create(link, "cron", [RIGHT], now=NOW)
    assert list(keys.read(path)) == ["web"]


def test_links_of_a_mounted_secret_are_followed_when_read(path, tmp_path):
    """Kubernetes mounts a secret as keys.toml -> ..data/keys.toml, ..data -> a folder that it replaces."""
    (tmp_path / "..1").mkdir()
    keys.create(tmp_path / "..1" / "keys.toml", "web", [RIGHT], now=NOW)
    (tmp_path / "..data").symlink_to("..1")
    path.symlink_to("..data/keys.toml")
    assert list(keys.read(path)) == ["web"]


def test_file_that_every_user_can_write_is_refused(path):
    keys.create(path, "web", [RIGHT], now=NOW)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="can be written by every user"):
        keys.read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another group")
def test_file_stays_readable_for_its_group_when_root_changes_it(path):
    """As docs/server/operations.md has it: root owns the file, and the server may read it."""
    path.touch()
    os.chown(path, 0, 1234)
    path.chmod(0o640)
    keys.create(path, "web", [RIGHT], now=NOW)
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (0, 1234, 0o640)


ENTRY = '[[key]]\nwho = "web"\nsha256 = "%s"\ncreated = 2030-01-31T12:00:00Z\n' % ("0" * 64)
ALLOW = 'allow = [{verbs = ["lock"], namespace = "", prefix = ""}]\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[key", "is not TOML"),
        ("key = " + "[" * 5000, "is not TOML"),
        ("key = " + "1" * 5000, "is not TOML"),
        ("\xff", "is not UTF-8"),
        ("[keys]\n", "nothing but entries"),
        ("key = 1\n", "nothing but entries"),
        ("key = [1]\n", "entry 1: it is not a table"),
        (ENTRY, "entry 1: `allow` must be"),
        (ENTRY + "allow = []", "entry 1: `allow` must be"),
        (ENTRY + ALLOW.replace('"lock"', '"write"'), "the verbs of a right are read, lock, break, not 'write'"),
        (ENTRY + ALLOW.replace('"lock"', ""), "the verbs of a right are"),
        (ENTRY + ALLOW.replace(', prefix = ""', ""), "a right has `verbs`, `namespace` and `prefix`"),
        (ENTRY + ALLOW.replace('prefix = ""', "prefix = 1"), "must be text"),
        (ENTRY + ALLOW + "expire = 2030-01-31T12:00:00Z\n", r"unknown word 'expire' \(did you mean expires\?\)"),
        (ENTRY + ALLOW + 'expires = "soon"\n', "`expires` must be a time with its zone"),
        (ENTRY + ALLOW + "expires = 2030-01-31T12:00:00\n", "`expires` must be a time with its zone"),
        (ENTRY.replace("created", "expires") + ALLOW, "`created` is missing"),
        (ENTRY.replace('"web"', '"we b"') + ALLOW, "`who` must be"),
        (ENTRY.replace('who = "web"\n', "") + ALLOW, "`who` must be"),
        (ENTRY.replace("0" * 64, "0" * 63) + ALLOW, "`sha256` must be"),
        (ENTRY + ALLOW + ENTRY + ALLOW, "entry 2: web has an entry already"),
    ],
)
def test_bad_file_is_refused_with_its_entry(path, text, complaint):
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=complaint):
        keys.read(path)


def test_expired_key_is_known_by_the_clock(path):
    keys.create(path, "web", [RIGHT], now=NOW, expires=NOW + timedelta(seconds=1))
    (key,) = keys.read(path).values()
    assert not key.expired(NOW.timestamp() + 0.9)
    assert key.expired(NOW.timestamp() + 1.0)


def test_second_writer_waits_for_the_first(path, monkeypatch):
    first_has_read, second_had_its_chance = threading.Event(), threading.Event()
    replace = keys._replace

    def slow_replace(*arguments):
        if not first_has_read.is_set():
            first_has_read.set()
            assert second_had_its_chance.wait(60)
        replace(*arguments)

    monkeypatch.setattr(keys, "_replace", slow_replace)
    first, second = (
        threading.Thread(target=keys.create, args=(path, who, [RIGHT]), kwargs={"now": NOW}) for who in ("web", "cron")
    )
    first.start()
    assert first_has_read.wait(60)
    second.start()
    second.join(timeout=0.5)  # it would end now if it did not wait
    second_had_its_chance.set()
    first.join()
    second.join()
    assert list(keys.read(path)) == ["web", "cron"]


CREATE = """
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from leasehold.server import keys
for n in range(5):
    keys.create(Path(sys.argv[1]), f"{sys.argv[2]}-{n}", [keys.Right.parse("lock::")], now=datetime.now(UTC))
"""


def test_keys_created_by_processes_at_once_are_all_kept(path):
    children = [subprocess.Popen([sys.executable, "-c", CREATE, str(path), f"w{n}"]) for n in range(4)]
    assert [child.wait(timeout=120) for child in children] == [0] * 4
    assert sorted(keys.read(path)) == sorted(f"w{child}-{n}" for child in range(4) for n in range(5))
    assert list(path.parent.iterdir()) == [path]
