"""`leasehold doctor` on real ZooKeeper servers."""

import pytest

from tests.support.doctor import examine, unsafe


def test_one_server_has_nothing_unsafe(url):
    assert unsafe(url) == {}


def test_sessions_shorter_than_the_usual_ttl_are_a_note(url):
    found = {each.check: each for each in examine(url)}
    assert found["session"].severity == "note"  # the server ends a silent session after 10 s
    assert "maxSessionTimeout" in found["session"].fix


def test_session_that_the_url_shortens_is_a_note_about_the_url(url):
    separator = "&" if "?" in url else "?"
    found = {each.check: each for each in examine(f"{url}{separator}session=2")}
    assert "session= in the URL" in found["session"].fix


@pytest.mark.extended  # elections take seconds
def test_ensemble_without_a_spare_server_is_a_warning(three_servers, url_of, wait_until):
    url = url_of(*three_servers.members)
    down = three_servers.follower()
    down.kill()
    wait_until(lambda: {"members", "quorum"} <= unsafe(url).keys(), every=0.2)
    assert f"127.0.0.1:{down.port} is down" in unsafe(url)["members"]
