"""What all clients of one server would log is logged once, or seldom."""

from __future__ import annotations

import logging
from contextlib import suppress

from leasehold import Client, NotAcquired
from leasehold.engines import repeated_logs
from leasehold.engines.repeated_logs import log_once, log_seldom
from tests.support import probe_logs

LOG = logging.getLogger("leasehold.test")


def lines(caplog):
    """Without those of other tests' clients."""
    return [record for record in caplog.records if record.name == LOG.name]


def test_same_text_is_a_warning_once_and_then_debug(caplog):
    caplog.set_level(logging.DEBUG, logger="leasehold")
    for _ in range(3):
        log_once(LOG, logging.WARNING, "host-a keeps no log")
    log_once(LOG, logging.WARNING, "host-b keeps no log")
    assert [record.levelname for record in lines(caplog)] == ["WARNING", "DEBUG", "DEBUG", "WARNING"]


def test_line_that_was_not_shown_counts_as_not_logged(caplog):
    caplog.set_level(logging.ERROR, logger="leasehold")
    log_once(LOG, logging.WARNING, "host-a keeps no log")
    caplog.set_level(logging.WARNING, logger="leasehold")
    log_once(LOG, logging.WARNING, "host-a keeps no log")
    assert [record.levelname for record in lines(caplog)] == ["WARNING"]


def test_seldom_line_comes_every_ten_seconds_with_its_count(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(repeated_logs, "monotonic", lambda: now[0])
    for at in (100, 101, 109.9, 110, 120.1):
        now[0] = at
        log_seldom(LOG, logging.WARNING, "lost the connection", f" at {at}")
    assert [record.getMessage() for record in lines(caplog)] == [
        "lost the connection at 100",
        "lost the connection (2 more times since the last line) at 110",
        "lost the connection at 120.1",
    ]


def test_memory_of_lines_is_bounded():
    for number in range(5000):
        log_once(LOG, logging.WARNING, str(number))
        log_seldom(LOG, logging.WARNING, str(number))
    assert len(getattr(*probe_logs.LOGGED_LINES)) <= 1000
    assert len(getattr(*probe_logs.RECENT_LINES)) <= 1000


def test_clients_of_one_sqlite_file_log_once_that_they_poll(tmp_path, caplog):
    (tmp_path / "locks.db-wakeup").write_text("not a folder")
    for _ in range(3):
        with Client(f"sqlite://{tmp_path}/locks.db") as client:
            holder = client.lock("a").acquire()
            with suppress(NotAcquired):
                Client(f"sqlite://{tmp_path}/locks.db").lock("a").acquire(wait=0.1)
            holder.release()
    texts = [record.getMessage() for record in caplog.records if "falling back to polling" in record.getMessage()]
    assert len(texts) == 1
    assert f"{tmp_path}/locks.db" in texts[0]
