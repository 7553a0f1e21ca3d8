"""Ten tasks for two accounts, and a worker with four threads: one import per account at a time."""

import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

from celery import Celery

from leasehold.integrations.celery import singleton

FOLDER = os.environ.get("EXAMPLE_FOLDER", "")

app = Celery("shop", broker="filesystem://", backend=f"file://{FOLDER}/results")  # your broker: redis://..., amqp://...
app.conf.broker_transport_options = dict.fromkeys(["data_folder_in", "data_folder_out"], f"{FOLDER}/queue")
app.conf.broker_transport_options["control_folder"] = f"{FOLDER}/control"
app.conf.leasehold = f"sqlite://{FOLDER}/locks.db"  # an engine that all workers share


@app.task(name="import")
@singleton("import:{account_id}", on_busy="wait")
def import_account(account_id):
    begin = time.time()
    time.sleep(0.05)
    return account_id, begin, time.time()


def show() -> None:
    tasks = [import_account.delay(number % 2) for number in range(10)]
    command = [sys.executable, "-m", "celery", "--app=celery_singleton", "worker", "--pool=threads", "--concurrency=4"]
    options = ["--loglevel=error", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.Popen([*command, *options], env=environment, cwd=FOLDER, stdout=subprocess.DEVNULL)
    try:
        runs = sorted(task.get(timeout=240) for task in tasks)
    finally:
        worker.terminate()
        worker.wait()
    overlaps = sum(first[0] == next_[0] and first[2] > next_[1] for first, next_ in pairwise(runs))
    print(len(runs), "imports,", overlaps, "of them at the same time as another import of their account")
    if overlaps:
        raise SystemExit(1)


if __name__ == "__main__" and not FOLDER:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("queue", "control", "results"):
            os.mkdir(f"{folder}/{name}")
        sys.exit(subprocess.call([sys.executable, __file__], env=os.environ | {"EXAMPLE_FOLDER": folder}))
elif __name__ == "__main__":
    show()
