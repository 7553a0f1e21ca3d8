"""`manage.py leasehold_migrate`: Django's migrate, in one process at a time."""

from __future__ import annotations

from typing import Any, Final

from django.core.management import CommandError
from django.core.management.commands import migrate

from leasehold.errors import LeaseholdError
from leasehold.integrations.django import client

_TTL: Final = 60.0
_WAIT: Final = 600.0


class Command(migrate.Command):  # type: ignore[misc]  # Django has no types
    help = (
        "Django's migrate in one process at a time, with the same options. The others wait, up to 10 minutes, and find "
        "nothing to do."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with client().lock("migrate", ttl=_TTL, wait=_WAIT, purpose="manage.py migrate"):
                super().handle(*args, **options)
        except LeaseholdError as error:
            raise CommandError(str(error)) from error
