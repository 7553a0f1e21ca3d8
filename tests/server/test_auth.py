"""Who a caller is, and what it may do."""

import hashlib
import hmac
import logging
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from leasehold.errors import ConfigError
from leasehold.server import auth, keys
from leasehold.server.auth import ANYONE, Authenticator, Caller
from leasehold.server.keys import Right

NOW = datetime.now(UTC)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.toml"


def create(path, who, *allow, expires=None, certificate=False):
    rights = [Right.parse(text) for text in allow or ["lock,read:shop:orders/"]]
    return keys.create(path, who, rights, now=NOW, expires=expires, certificate=certificate)


def identify(authenticator, key, names=()):
    return authenticator.identify(f"Bearer {key}".encode(), names)


def refresh(authenticator):
    """Two checks of the file: it is read once it no longer changes."""
    for _ in range(2):
        authenticator.refresh()


# -- rights


@pytest.mark.parametrize("verb", ["read", "lock", "break"])
@pytest.mark.parametrize("granted", ["read", "lock", "break"])
def test_no_verb_implies_another(verb, granted):
    caller = Caller("web", (Right.parse(f"{granted}:shop:orders/"),))
    assert caller.may(verb, "shop", "orders/42") is (verb == granted)


@pytest.mark.parametrize(
    ("right", "namespace", "name", "covered"),
    [
        ("lock:shop:orders/", "shop", "orders/42", True),
        ("lock:shop:orders/", "shop", "orders/", True),
        ("lock:shop:orders/", "shop", "orders", False),
        ("lock:shop:orders/", "shop", "other", False),
        ("lock:shop:orders/", "", "orders/42", False),
        ("lock:shop:orders/", "shop2", "orders/42", False),
        ("lock:shop:orders/", "Shop", "orders/42", False),
        ("lock:shop:", "shop", "anything", True),
        ("lock::", "", "anything", True),
        ("lock::", "shop", "anything", False),
        ("lock:*:", "", "anything", True),
        ("lock:*:", "shop", "anything", True),
        ("lock:*:orders/", "shop", "other", False),
        ("lock:shop:a:b", "shop", "a:bc", True),
        ("lock:shop:a:b", "shop:a", "bc", False),
        ("lock:shop:*", "shop", "anything", False),
    ],
)
def test_right_covers_its_namespace_and_prefix_only(right, namespace, name, covered):
    assert Caller("web", (Right.parse(right),)).may("lock", namespace, name) is covered


def test_verbs_and_prefix_of_two_rights_are_not_mixed():
    caller = Caller("web", (Right.parse("read:shop:"), Right.parse("lock::orders/")))
    assert not caller.may("lock", "shop", "orders/1")
    assert not caller.may("read", "", "orders/1")


@pytest.mark.parametrize(
    ("prefix", "permitted"), [("", False), ("ord", False), ("orders/", True), ("orders/4", True), ("other", False)]
)
def test_listing_needs_a_right_for_the_whole_prefix(prefix, permitted):
    caller = Caller("web", (Right.parse("read:shop:orders/"), Right.parse("lock:shop:")))
    assert caller.may_list("shop", prefix) is permitted
    assert not caller.may_list("", prefix)


def test_anyone_may_do_everything_without_limits_per_key():
    assert all(ANYONE.may(verb, space, "x") for verb in keys.VERBS for space in ("", "shop"))
    assert ANYONE.may_list("shop", "")
    assert not ANYONE.limited


# -- keys


def test_key_identifies_its_caller(path):
    web, cron = create(path, "web"), create(path, "cron_job", "break::")
    authenticator = Authenticator(path)
    assert identify(authenticator, web).who == "web"
    assert identify(authenticator, cron).who == "cron_job"
    assert identify(authenticator, cron).may("break", "", "x")
    assert authenticator.identify(f"bearer {web}".encode(), ()).who == "web"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic {key}",
        "{key}",
        "Bearer {key}0",
        "Bearer x{key}",
        "Bearer lh_web_",
        "Bearer {upper}",
        "Bearer {other}",
        "Bearer {wrong}",
        "Bearer {key} {key}",
        "Bearer {key}\0",
        "Bearer " + "x" * 100_000,
        "Bearer lh__" + "0" * 64,
        "Bearer lh_unknown_" + "0" * 64,
        "Bearer \xff\xfe",
    ],
)
def test_anything_but_the_key_is_refused(path, header):
    key = create(path, "web")
    wrong = key[:-1] + ("0" if key[-1] != "0" else "1")
    header = header.format(key=key, upper=key.upper(), other=key.replace("web", "cron"), wrong=wrong)
    assert Authenticator(path).identify(header.encode("latin-1"), ()) is None


def test_no_header_is_refused_when_there_are_keys(path):
    create(path, "web")
    assert Authenticator(path).identify(b"", ()) is None


def test_server_without_keys_and_certificates_serves_anyone():
    assert Authenticator(None).identify(b"", ()) is ANYONE
    assert Authenticator(None).identify(b"Bearer x", ("web",)) is ANYONE


def test_empty_key_file_lets_no_caller_in(path):
    path.touch(0o600)
    authenticator = Authenticator(path)
    assert authenticator.identify(b"", ()) is None
    assert identify(authenticator, "lh_web_" + "0" * 64) is None


def test_key_is_refused_once_it_expires(path):
    key = create(path, "web", expires=NOW + timedelta(seconds=60))
    clock = [NOW.timestamp()]
    authenticator = Authenticator(path, now=lambda: clock[0])
    caller = identify(authenticator, key)
    assert caller is not None
    clock[0] += 61
    assert identify(authenticator, key) is None
    assert not authenticator.still(caller)


def test_missing_key_file_refuses_to_start(path):
    with pytest.raises(ConfigError, match=r"the key file cannot be read: .*keys\.toml: No such file"):
        Authenticator(path)


def test_same_work_is_done_for_an_unknown_caller(path, monkeypatch):
    """So the time of an answer says nothing about who has a key. Counted, because times depend on the machine."""
    key = create(path, "web")
    create(path, "cert", certificate=True)
    authenticator = Authenticator(path)
    work = []

    def sha256(data):
        work.append(("hash", len(data)))
        return hashlib.sha256(data)

    def compare_digest(one, other):
        work.append(("compare", len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(auth, "hashlib", SimpleNamespace(sha256=sha256))
    monkeypatch.setattr(auth, "hmac", SimpleNamespace(compare_digest=compare_digest))
    for who in ("web", "cop", "cert"):
        assert identify(authenticator, f"lh_{who}_{'0' * 64}") is None
    assert identify(authenticator, key).who == "web"
    hashed = len("lh_web_") + 64
    one, unknown, certificate, good = work[0:2], work[2:4], work[4:6], work[6:8]
    assert one == unknown == good == [("hash", hashed), ("compare", 32, 32)]
    assert certificate == [("hash", hashed + 1), ("compare", 32, 32)]


# -- changes of the file


def test_revoked_key_is_refused_after_refresh(path):
    web, cron = create(path, "web"), create(path, "cron")
    authenticator = Authenticator(path)
    caller = identify(authenticator, web)
    assert authenticator.still(caller)
    keys.revoke(path, "web")
    refresh(authenticator)
    assert identify(authenticator, web) is None
    assert not authenticator.still(caller)
    assert identify(authenticator, cron).who == "cron"


def test_new_key_is_known_after_refresh(path):
    create(path, "web")
    authenticator = Authenticator(path)
    cron = create(path, "cron")
    assert identify(authenticator, cron) is None
    refresh(authenticator)
    assert identify(authenticator, cron).who == "cron"


def test_caller_whose_rights_changed_is_identified_anew(path):
    create(path, "web")
    authenticator = Authenticator(path)
    caller = Caller("web", (Right.parse("lock:*:"),))
    assert not authenticator.still(caller)


@pytest.mark.parametrize("damage", ["garbage", "removed", "writable", "folder"])
def test_file_that_cannot_be_read_changes_nothing_and_is_logged(path, damage, caplog):
    key = create(path, "web")
    authenticator = Authenticator(path)
    if damage == "garbage":
        path.write_text(path.read_text() + "[[key]]\nwho = ")
    elif damage == "writable":
        path.write_text(path.read_text() + "# changed\n")
        path.chmod(0o666)
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    for _ in range(3):
        authenticator.refresh()
    assert identify(authenticator, key).who == "web"
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "the old content stays in force" in line.getMessage()
    assert key not in caplog.text


def test_file_whose_mode_was_corrected_is_read_without_a_signal(path):
    """The log says which `chmod` to run. That changes neither the content nor its time."""
    create(path, "web")
    authenticator = Authenticator(path)
    keys.revoke(path, "web")
    path.chmod(0o666)
    refresh(authenticator)
    path.chmod(0o600)
    refresh(authenticator)
    assert not authenticator.still(Caller("web", (Right.parse("lock,read:shop:orders/"),)))


def test_file_that_is_being_written_revokes_no_key(path):
    key = create(path, "web")
    authenticator, text = Authenticator(path), path.read_text()
    for part in ("", text[:20], text + "# the end\n"):
        path.write_text(part)
        authenticator.refresh()
        assert identify(authenticator, key).who == "web"
    authenticator.refresh()
    assert identify(authenticator, key).who == "web"


def test_unchanged_file_is_not_read_again(path, monkeypatch):
    create(path, "web")
    authenticator = Authenticator(path)
    monkeypatch.setattr(auth.keys, "read", lambda path: pytest.fail("read again"))
    authenticator.refresh()


def test_forced_refresh_reads_an_unchanged_file(path, caplog):
    create(path, "web")
    authenticator = Authenticator(path)
    caplog.set_level(logging.INFO)
    authenticator.refresh(force=True)
    assert "the key file has been read again" in caplog.text


def test_bug_while_reading_does_not_end_the_timer(path, monkeypatch, caplog):
    key = create(path, "web")
    authenticator = Authenticator(path)

    def fail(path):
        raise RuntimeError("bug")

    monkeypatch.setattr(auth.keys, "read", fail)
    authenticator.refresh(force=True)
    assert identify(authenticator, key).who == "web"
    assert "the old content stays in force" in caplog.text


# -- certificates


def test_certificate_name_in_the_file_identifies_its_caller(path):
    create(path, "web.internal", "lock:shop:", certificate=True)
    create(path, "spiffe://shop/cron", "break::", certificate=True)
    create(path, "keyed", "read::")
    authenticator = Authenticator(path, certificates=True)
    assert authenticator.identify(b"", ("web.internal",)).may("lock", "shop", "x")
    assert authenticator.identify(b"", ("other", "spiffe://shop/cron")).who == "spiffe://shop/cron"
    assert authenticator.identify(b"", ("keyed",)).who == "keyed", "an entry with a key is for its certificate, too"


@pytest.mark.parametrize("names", [(), ("other",), ("web.internal.evil",), ("internal",), ("",), ("*.internal",)])
def test_certificate_with_other_names_is_refused(path, names):
    create(path, "web.internal", certificate=True)
    assert Authenticator(path, certificates=True).identify(b"", names) is None


def test_certificate_names_count_only_where_certificates_are_asked_for(path):
    create(path, "web", certificate=True)
    assert Authenticator(path).identify(b"", ("web",)) is None


def test_wrong_key_is_refused_in_spite_of_a_good_certificate(path):
    create(path, "web", certificate=True)
    assert Authenticator(path, certificates=True).identify(b"Bearer x", ("web",)) is None


def test_entry_of_a_certificate_has_no_key_that_fits(path):
    create(path, "web", certificate=True)
    authenticator = Authenticator(path, certificates=True)
    assert identify(authenticator, "lh_web_" + "0" * 64) is None


def test_expired_entry_refuses_its_certificate(path):
    create(path, "web", certificate=True, expires=NOW - timedelta(days=1))
    assert Authenticator(path, certificates=True).identify(b"", ("web",)) is None


def test_every_certificate_may_do_everything_without_a_key_file():
    authenticator = Authenticator(None, certificates=True)
    caller = authenticator.identify(b"", ("web.internal", "x"))
    assert caller.who == "web.internal"
    assert caller.may("break", "shop", "x")
    assert authenticator.identify(b"", ()) is None
    assert authenticator.identify(b"Bearer x", ("web",)) is None


def test_names_of_an_unverified_connection_are_empty():
    assert list(auth.certificate_names({})) == []
    assert list(auth.certificate_names({"extensions": {auth.CERTIFICATE_NAMES: ("a",)}})) == ["a"]


def test_secrets_are_in_no_repr(path):
    key = create(path, "web")
    authenticator = Authenticator(path)
    shown = f"{authenticator!r} {identify(authenticator, key)!r} {keys.read(path)!r}"
    assert key[-64:] not in shown
