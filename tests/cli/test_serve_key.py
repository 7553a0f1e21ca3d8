"""`leasehold serve key`: what an administrator sees, and what goes to stdout."""

import json
import re

import pytest

from leasehold.server import keys


def create(shell, who="web", *more, allow="lock,read:shop:orders/"):
    return shell("serve", "key", "create", who, "--allow", allow, "--keys", "keys.toml", *more)


def test_create_prints_nothing_but_the_key_to_stdout(shell):
    done = create(shell)
    assert done.returncode == 0
    assert re.fullmatch(r"lh_web_[0-9a-f]{64}\n", done.stdout)
    assert done.stderr == "leasehold: the key of web may read,lock:shop:orders/; the key is not shown again:\n"
    assert list(keys.read(shell.folder / "keys.toml")) == ["web"]


def test_several_rights_and_an_expiry_are_stored(shell):
    assert create(shell, "ops", "--allow", "break::", "--expires", "90d", allow="read:*:").returncode == 0
    (key,) = keys.read(shell.folder / "keys.toml").values()
    assert [str(right) for right in key.allow] == ["read:*:", "break::"]
    assert (key.expires - key.created).days == 90


def test_certificate_entry_prints_no_key(shell):
    done = create(shell, "spiffe://shop/web", "--certificate")
    assert (done.returncode, done.stdout) == (0, "")
    assert "a client certificate with the name spiffe://shop/web may now" in done.stderr


def test_list_shows_rights_and_no_hash(shell):
    create(shell)
    create(shell, "cron", "--expires", "1s", allow="lock::\x1b[31m")
    create(shell, "web.internal", "--certificate")
    done = shell("serve", "key", "list", "--keys", "keys.toml")
    assert done.returncode == 0
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["WHO", "KIND", "CREATED", "EXPIRES", "ALLOW"]
    assert [row.split()[:2] for row in rows] == [["web", "key"], ["cron", "key"], ["web.internal", "certificate"]]
    assert rows[0].split()[3:] == ["never", "read,lock:shop:orders/"]
    assert "\x1b" not in done.stdout
    for key in keys.read(shell.folder / "keys.toml").values():
        assert key.sha256 is None or key.sha256.hex() not in done.stdout


def test_list_as_json_has_every_field_but_the_hash(shell):
    create(shell, "web", "--expires", "90d")
    (entry,) = json.loads(shell("-o", "json", "serve", "key", "list", "--keys", "keys.toml").stdout)
    assert set(entry) == {"who", "kind", "created", "expires", "expired", "allow"}
    assert entry["allow"] == [{"verbs": ["lock", "read"], "namespace": "shop", "prefix": "orders/"}]
    assert entry["expired"] is False


def test_revoke_removes_the_key(shell):
    create(shell)
    done = shell("serve", "key", "revoke", "web", "--keys", "keys.toml")
    assert (done.returncode, done.stderr) == (0, "leasehold: the key of web is revoked\n")
    assert shell("serve", "key", "list", "--keys", "keys.toml").stderr == "leasehold: keys.toml has no keys\n"


def test_file_is_taken_from_the_environment(shell):
    done = shell("serve", "key", "create", "web", "--allow", "lock::", LEASEHOLD_SERVE_KEYS="keys.toml")
    assert done.returncode == 0
    assert list(keys.read(shell.folder / "keys.toml")) == ["web"]


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["create", "web", "--keys", "k"], 64, "Missing option '--allow'"),
        (["create", "web", "--allow", "lock::"], 64, "Missing option '--keys'"),
        (["create", "web", "--allow", "lock", "--keys", "k"], 64, "VERBS:NAMESPACE:PREFIX"),
        (["create", "web", "--allow", "write::", "--keys", "k"], 64, "the verbs of a right are read, lock, break"),
        (["create", "we b", "--allow", "lock::", "--keys", "k"], 78, "WHO must be 1 to 64 letters"),
        (["create", "web", "--allow", "lock::", "--expires", "0", "--keys", "k"], 64, "more than 0 seconds"),
        (["create", "web", "--allow", "lock::", "--expires", "999999d", "--keys", "k"], 64, "at most 100 years"),
        (["create", "web", "--allow", "lock::", "--keys", "no/k"], 78, "no: No such file or directory"),
        (["create", "web", "--allow", "lock::", "--keys", "."], 78, "is a folder|is not a regular file"),
        (["list", "--keys", "none"], 78, "none cannot be read: No such file or directory"),
        (["revoke", "web", "--keys", "none"], 78, "none does not exist"),
        (["lst", "--keys", "k"], 64, "No such command 'lst'"),
    ],
)
def test_mistake_is_explained_with_its_exit_code(shell, arguments, code, complaint):
    done = shell("serve", "key", *arguments)
    assert done.returncode == code, done.stderr
    assert re.search(complaint, done.stderr), done.stderr
    assert done.stdout == ""
    assert "bug in leasehold" not in done.stderr


def test_second_key_of_the_same_caller_is_refused(shell):
    create(shell)
    done = create(shell)
    assert done.returncode == 78
    assert "create a key with another WHO, such as web-2" in done.stderr
