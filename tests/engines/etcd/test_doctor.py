"""`leasehold doctor` on real etcd members."""

from contextlib import suppress
from urllib.error import HTTPError

from tests.support.doctor import examine, unsafe


def test_one_member_has_nothing_unsafe(url):
    assert unsafe(url) == {}


def test_full_quota_is_a_danger_and_no_lock_is_tried(start_member):
    member = start_member("--quota-backend-bytes", "40000")
    url = f"etcd://127.0.0.1:{member.port}"
    with suppress(HTTPError):
        for number in range(100):
            member.put(f"filler-{number}", "x" * 10_000)
    found = examine(url)
    assert {"reachable", "alarm"} <= {each.check for each in found if each.severity == "danger"}
    assert "lock" not in {each.check for each in found}
