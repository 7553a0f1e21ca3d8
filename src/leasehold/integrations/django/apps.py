"""The application for INSTALLED_APPS: its name, and the checks of `manage.py check`."""

from __future__ import annotations

import os
from typing import Any

from django.apps import AppConfig
from django.core import checks

from leasehold.errors import LeaseholdError
from leasehold.integrations.django import client, client_arguments


class LeaseholdConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    name = "leasehold.integrations.django"
    label = "leasehold"
    verbose_name = "Leasehold"

    def ready(self) -> None:
        checks.register(check_settings, "leasehold")
        checks.register(check_shared_engine, "leasehold", deploy=True)


def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """The client is built, but does not connect."""
    try:
        client()
    except (LeaseholdError, TypeError) as bad:
        return [checks.Error(f"settings.LEASEHOLD is not valid: {bad}", id="leasehold.E001")]
    return []


def check_shared_engine(**_: Any) -> list[checks.CheckMessage]:
    """For `check --deploy`: whether the engine excludes all processes that serve the project."""
    try:
        engine = client()._core.engine_name
    except (LeaseholdError, TypeError):
        return []  # the other check reports it
    hint = "set URL in settings.LEASEHOLD to an engine that all processes share, such as redis:// or postgresql://"
    if engine == "memory":
        return [checks.Warning("the locks of memory:// exclude one process only", hint, id="leasehold.W001")]
    if not client_arguments().get("url") and not os.environ.get("LEASEHOLD_URL"):
        text = "without a URL, locks exclude only the processes of one user on one machine"
        return [checks.Warning(text, hint, id="leasehold.W002")]
    return []
