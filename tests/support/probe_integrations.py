"""What tests read and change inside the integrations. Each function imports only the framework it is about."""

from __future__ import annotations

from typing import Any

from tests.support.probe import Place


def celery_beat_wait() -> Place:
    """How long a stand-by waits for the lock before it returns to its own loop."""
    from leasehold.integrations.celery import beat

    return Place(beat, "_WAIT")


def django_migrate_wait() -> Place:
    """How long `manage.py leasehold_migrate` waits for another one."""
    from leasehold.integrations.django.management.commands import leasehold_migrate

    return Place(leasehold_migrate, "_WAIT")


def starlette_shortest_pause() -> Place:
    """Before a job that failed is started again."""
    from leasehold.integrations import starlette

    return Place(starlette, "_SHORTEST_PAUSE")


def alembic_lock_url(context: Any, url: str | None) -> str | None:
    """The engine that guards migrations."""
    from leasehold.integrations.alembic import _lock_url

    return _lock_url(context, url)


def beat_lease(scheduler: Any) -> Any:
    """The lease of a scheduler of Celery that leads; None while another one leads."""
    return scheduler._lease


def replace_beat_lease(scheduler: Any, lease: Any) -> None:
    scheduler._lease = lease


def step_down(scheduler: Any) -> None:
    """Let the scheduler of Celery give up its lease."""
    scheduler._step_down()


def beat_send(scheduler: Any) -> Place:
    """The step that sends a task which is due."""
    return Place(scheduler, "_send")


def running_jobs(scheduler: Any) -> dict[str, int]:
    """The jobs that APScheduler takes to be running."""
    found: dict[str, int] = scheduler._executors["default"]._instances
    return found
