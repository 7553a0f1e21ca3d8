"""`manage.py leasehold`: the commands of `leasehold` on the engine of settings.LEASEHOLD, and migrations once."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management import BaseCommand, CommandError, call_command

from leasehold.cli.app import start
from leasehold.errors import LeaseholdError
from leasehold.integrations.django import client_arguments


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    help = (
        "ls, get, break, watch, doctor and all other commands of `leasehold`, on the engine of settings.LEASEHOLD. "
        "migrate: the same as `manage.py leasehold_migrate`."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("command", help="ls, break, migrate, or another command of `leasehold`")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its options and arguments")

    def handle(self, *, command: str, arguments: list[str], **_: Any) -> None:
        if command == "migrate":
            call_command("leasehold_migrate", *arguments)
            return
        try:
            given = client_arguments()
        except LeaseholdError as error:
            raise CommandError(str(error)) from error
        if given.get("password") is not None:
            raise CommandError(
                "the commands cannot use the PASSWORD of settings.LEASEHOLD: give the URL the option password_file= "
                "instead, or run the command `leasehold` with $LEASEHOLD_URL"
            )
        url = ["-u", given["url"]] if given.get("url") else []
        namespace = ["--namespace", given["namespace"]] if given.get("namespace") else []
        if code := start([*url, *namespace, command, *arguments]):
            raise SystemExit(code)
