"""The sockets of a server: TCP, and Unix sockets with their files."""

import os
import socket
import stat

import pytest

from leasehold.errors import ConfigError
from leasehold.server.run import listen


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_unix_socket_has_its_mode_from_the_start(tmp_path, mode):
    before = os.umask(0)
    try:
        with listen(f"unix:{tmp_path}/s", mode):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode
        assert os.umask(0) == 0, "the umask of the process is what it was"
    finally:
        os.umask(before)


def test_socket_file_that_a_server_left_is_replaced(tmp_path):
    listen(f"unix:{tmp_path}/s").close()
    with listen(f"unix:{tmp_path}/s"), socket.socket(socket.AF_UNIX) as caller:
        caller.connect(f"{tmp_path}/s")


def test_socket_that_another_server_serves_is_not_replaced(tmp_path):
    with listen(f"unix:{tmp_path}/s"), pytest.raises(ConfigError, match="Address already in use"):
        listen(f"unix:{tmp_path}/s")


@pytest.mark.parametrize("kind", ["file", "link"])
def test_file_that_is_no_socket_is_not_removed(tmp_path, kind):
    target = tmp_path / "precious"
    target.write_text("x")
    if kind == "link":
        (tmp_path / "s").symlink_to(target)
        target = tmp_path / "s"
    with pytest.raises(ConfigError, match="cannot listen on unix:"):
        listen(f"unix:{target}")
    assert target.read_text() == "x"


def test_address_in_use_is_named(tmp_path):
    with listen("127.0.0.1:0") as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            listen(f"127.0.0.1:{port}")
