"""Two servers with the same FastAPI application: one runs the background job, and the other takes over."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from fastapi import FastAPI

from leasehold.integrations.fastapi import lifespan


async def send_mails(lease):
    """Runs in one process only; cancelled when that process stops or loses its lease."""
    with open("leader", "w") as file:
        file.write(f"{os.getpid()} {lease.token}")
    await asyncio.sleep(3600)  # your loop


app = FastAPI(lifespan=lifespan(jobs={"mailer": send_mails}))  # the engine is that of $LEASEHOLD_URL


@app.get("/pid")
async def pid() -> int:
    return os.getpid()


def wait_for(condition):
    for _ in range(4800):
        if found := condition():
            return found
        time.sleep(0.05)
    raise SystemExit("nothing happened for four minutes")


def show(folder: str) -> None:
    environment = os.environ | {"LEASEHOLD_URL": f"sqlite://{folder}/locks.db", "PYTHONPATH": os.pathsep.join(sys.path)}

    def start() -> tuple[subprocess.Popen[bytes], int]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "fastapi_leader:app", "--log-level=warning", f"--port={port}"]
        return subprocess.Popen(command, cwd=folder, env=environment), port

    def answer(port: int) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/pid", timeout=60) as response:
                return response.read().decode()
        except urllib.error.URLError:
            return None

    def leader() -> str | None:
        try:
            with open(f"{folder}/leader") as file:
                return file.read().partition(" ")[0]
        except FileNotFoundError:
            return None

    servers = [start(), start()]
    try:
        pids = [wait_for(lambda port=port: answer(port)) for _, port in servers]
        first = wait_for(leader)
        print(f"two servers answer, and server {pids.index(first) + 1} sends the mails")
        servers[pids.index(first)][0].terminate()
        second = wait_for(lambda: leader() not in ("", first) and leader())
        print(f"that server is stopped, and server {pids.index(second) + 1} takes over")
    finally:
        for process, _ in servers:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        show(temporary)
