"""`leasehold doctor` on a real ZooKeeper server."""

from tests.support.doctor import unsafe


def test_one_server_has_nothing_unsafe(url):
    assert set(unsafe(url)) <= {"hand-off"}  # as slow as this machine is
