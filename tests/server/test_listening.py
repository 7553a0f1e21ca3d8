"""The sockets of a server: TCP, and Unix sockets with their files."""

import os
import socket
import stat
import threading

import pytest

from leasehold.errors import ConfigError
from leasehold.server.run import listen
from tests.support import probe_server


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


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to act as a second user")
def test_link_of_another_user_to_a_folder_is_not_followed(tmp_path):
    """A stranger's link led the server of root to another folder: it removed and made sockets there."""
    shared, target = tmp_path / "shared", tmp_path / "target"
    shared.mkdir()
    shared.chmod(0o1777)
    target.mkdir()
    listen(f"unix:{target}/s").close()  # a socket that another program left
    before = (target / "s").stat().st_ino
    (shared / "run").symlink_to(target)
    os.lchown(shared / "run", 65533, 65533)
    with pytest.raises(ConfigError, match="symbolic link that user 65533 could change"):
        listen(f"unix:{shared}/run/s")
    assert (target / "s").stat().st_ino == before


def test_folder_swapped_while_listening_begins_is_not_used(tmp_path, monkeypatch):
    """The path of the folder was used again and again, so another user could choose where a socket is removed."""
    folder, target = tmp_path / "run", tmp_path / "target"
    for each in (folder, target):
        each.mkdir()
        listen(f"unix:{each}/s").close()
    before, is_served = (target / "s").stat().st_ino, getattr(*probe_server.IS_SERVED)

    def swap(path):
        folder.rename(tmp_path / "moved")
        folder.symlink_to(target)
        return is_served(path)

    monkeypatch.setattr(*probe_server.IS_SERVED, swap)
    with listen(f"unix:{folder}/s"), socket.socket(socket.AF_UNIX) as caller:
        caller.connect(f"{tmp_path}/moved/s")
    assert (target / "s").stat().st_ino == before


def test_socket_that_accepts_nothing_does_not_hold_up_the_server(tmp_path):
    """Its queue of connections is full: a call of connect() waited for ever."""
    with socket.socket(socket.AF_UNIX) as planted, socket.socket(socket.AF_UNIX) as waiting:
        planted.bind(f"{tmp_path}/s")
        planted.listen(0)
        waiting.connect(f"{tmp_path}/s")
        refused = []

        def try_to_listen():
            with pytest.raises(ConfigError, match="Address already in use"):
                listen(f"unix:{tmp_path}/s")
            refused.append(True)

        thread = threading.Thread(target=try_to_listen, daemon=True)
        thread.start()
        thread.join(60)
        assert refused


def test_address_in_use_is_named(tmp_path):
    with listen("127.0.0.1:0") as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            listen(f"127.0.0.1:{port}")
