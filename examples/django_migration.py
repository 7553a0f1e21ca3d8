"""Three processes of a Django project start at once and migrate: one does, the others wait and find nothing to do."""

import os
import subprocess
import sys
import tempfile

import django
from django.conf import settings
from django.core.management import call_command

FOLDER = os.environ.get("EXAMPLE_FOLDER", "")


def migrate() -> None:
    settings.configure(  # instead of your settings module
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{FOLDER}/shop.db"}},
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "leasehold.integrations.django"],
        LEASEHOLD={"URL": f"sqlite://{FOLDER}/locks.db"},
    )
    django.setup()
    call_command("leasehold", "migrate")  # on the command line: manage.py leasehold migrate


def show(folder: str) -> None:
    environment = os.environ | {"EXAMPLE_FOLDER": folder}
    processes = [
        subprocess.Popen([sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = [process.communicate()[0] for process in processes]
    applied = [text.count("... OK") for text in printed]
    print("migrations applied by each process:", *sorted(applied))
    if any(process.returncode for process in processes) or sum(map(bool, applied)) != 1:
        raise SystemExit("\n".join(printed))


if FOLDER:
    migrate()
else:
    with tempfile.TemporaryDirectory() as temporary:
        show(temporary)
