"""A scheduler for `celery beat` with a stand-by: of any number of beats one sends, and if it dies, the next goes on.

    app.conf.beat_scheduler = "leasehold.integrations.celery.beat:Scheduler"

The beat that sends holds a lock. When each entry last ran is kept in one value next to the lock, which changes by
compare-and-set. A tick is sent in three steps: write that it is being sent, send it, write that it was sent. So

- a beat that was paused, and whose lease is over, cannot write the first step, and does not send;
- if a beat dies between the first and the last step, the next one sends that tick, perhaps for the second time, with
  the same task id. No broker could tell it whether the message arrived.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

import celery
from celery import beat, schedules
from kombu.exceptions import OperationalError

from leasehold.blocking import Lease
from leasehold.errors import Conflict, LeaseLost, NotAcquired, Unavailable
from leasehold.integrations.celery import client
from leasehold.versioned import Value

_log = logging.getLogger("leasehold.integrations.celery.beat")

_TTL: Final = 15.0  # seconds after which the stand-by goes on
_WAIT: Final = 5.0  # seconds that a stand-by waits before it returns to beat's own loop
_PAUSE: Final = 1.0  # seconds before a tick is sent again that the broker did not take
_ALL_SENT_WITHIN: Final = timedelta(seconds=60)  # of ticks that are later than this, one is sent


class Scheduler(beat.Scheduler):  # type: ignore[misc]  # Celery has no types
    """For the setting `beat_scheduler`. Start two beats or more, with the same settings; the client is that of the
    setting `leasehold`, and the lock is `celery-beat:` and the name of the app.

    When a beat takes over, it sends all ticks of an interval that are at most a minute late, and one of those that are
    later; of a crontab, one. The state replaces beat's file: it is the same after a restart on another machine.
    """

    def __init__(self, app: celery.Celery, *args: Any, **kwargs: Any) -> None:
        self._name = f"celery-beat:{app.main or 'celery'}"
        self._lease: Lease | None = None
        self._version = ""
        self._sending: dict[str, str] | None = None  # the tick whose sending has begun: its entry and task id
        self._sent_id = ""  # the last that this process has sent
        self._closed = False
        super().__init__(app, *args, **kwargs)

    @property
    def info(self) -> str:
        return f"    . lock -> {self._name}"

    def tick(self, *_: Any, **__: Any) -> float:
        """Send one due entry, if this beat leads. Returns the seconds until it should be called again."""
        if self._closed:  # by beat's signal handler, whose own SystemExit is lost if a destructor was interrupted
            raise SystemExit
        try:
            if self._lease is None or not self._lease.held:
                self._take_over()
            if self._sending is not None:
                return self._finish_sending()
            return self._begin_sending()
        except NotAcquired:
            return 0.0  # another beat leads, and this one has waited for it
        except (Conflict, LeaseLost, Unavailable) as error:
            _log.warning("this beat does not send: %s", error)
            self._step_down()
            return _PAUSE

    def close(self) -> None:
        """Release the lock: a stand-by goes on at once."""
        self._closed = True
        self._step_down()
        super().close()

    # ------------------------------------------------------------------- leading

    def _take_over(self) -> None:
        """Wait for the lock, and go on where the beat before stopped. Raises `NotAcquired` if another beat leads."""
        self._step_down()
        self._lease = client(self.app).lock(self._name, ttl=_TTL, wait=_WAIT, purpose="celery beat").acquire()
        found = self._value.read()
        state = json.loads(found.value) if found.value else {"entries": {}, "sending": None}
        for name, (last_run_at, count) in state["entries"].items():
            if name in self.schedule:
                self.schedule[name].last_run_at = datetime.fromisoformat(last_run_at)
                self.schedule[name].total_run_count = count
        self._version, self._sending = found.version, state["sending"]
        self._write(self._sending)  # keeps the start of new entries; a beat that was only paused can no longer write
        _log.info("this beat sends from now on (token %d)", self._lease.token)

    def _step_down(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    # ------------------------------------------------------------------- sending

    def _begin_sending(self) -> float:
        """Write that the first due entry is being sent. If none is due: the seconds until one is."""
        wait = self.max_interval
        for entry in list(self.schedule.values()):
            due, seconds = self._is_due(entry)
            if due:
                sending = {"entry": entry.name, "id": self._task_id(entry)}
                self.schedule[entry.name] = entry._next_instance(last_run_at=_tick_time(entry))
                self._write(sending)
                return 0.0
            wait = min(wait, seconds)
        return float(max(0.0, wait))

    def _is_due(self, entry: beat.ScheduleEntry) -> tuple[bool, float]:
        try:
            due, seconds = entry.is_due()
        except Exception:  # of a schedule that the program defines: the other entries must go on
            _log.exception("cannot tell when %s is due", entry.name)
            return False, self.max_interval
        return due, self.max_interval if seconds is None else seconds

    def _finish_sending(self) -> float:
        """Send the tick that was begun, by this beat or by the one before, and write that it was sent."""
        assert self._sending is not None and self._lease is not None  # noqa: S101, PT018  # for the type checker
        entry = self.schedule.get(self._sending["entry"])
        if entry is not None and self._sending["id"] != self._sent_id:
            self._lease.check()
            if not self._send(entry, self._sending["id"]):
                return _PAUSE
            self._sent_id = self._sending["id"]
        self._write(None)
        return 0.0

    def _send(self, entry: beat.ScheduleEntry, task_id: str) -> bool:
        """False: the broker did not take it, and the tick must be sent again."""
        message = self.Entry(**{**dict(entry), "options": {**entry.options, "task_id": task_id}})
        _log.info("sending %s (%s)", entry.name, entry.task)
        try:
            self.apply_async(message, producer=self.producer, advance=False)
        except beat.SchedulingError as error:
            if isinstance(error.__context__, OperationalError | OSError):
                _log.warning("%s is sent again in %.0f s: %s", entry.name, _PAUSE, error)
                return False
            _log.exception("%s could not be sent; this tick is skipped", entry.name)
        return True

    def _task_id(self, entry: beat.ScheduleEntry) -> str:
        """The same for the same tick, whichever beat sends it."""
        return str(uuid5(NAMESPACE_URL, f"{self._name}/{entry.name}/{entry.total_run_count}/{entry.last_run_at}"))

    # ------------------------------------------------------------------- the state

    @property
    def _value(self) -> Value:
        return Value(client(self.app), self._name)

    def _write(self, sending: dict[str, str] | None) -> None:
        """Raises `Conflict` if another beat has taken over."""
        entries = {
            entry.name: (entry.last_run_at.isoformat(), entry.total_run_count) for entry in self.schedule.values()
        }
        text = json.dumps({"entries": entries, "sending": sending})
        self._version = self._value.write(text, self._version).version
        self._sending = sending


def _tick_time(entry: beat.ScheduleEntry) -> datetime | None:
    """When an entry that is due should have run: intervals then neither drift nor lose a tick. None: now."""
    schedule = entry.schedule
    if type(schedule) is not schedules.schedule or schedule.relative:
        return None
    # In UTC: across a change of the clock, an hour of another zone may be none or two.
    due_at: datetime = schedule.maybe_make_aware(entry.last_run_at).astimezone(UTC) + schedule.run_every
    return due_at if entry.default_now() - due_at <= _ALL_SENT_WITHIN else None
