"""What the interpreter does in one uncontended pair: bytecode instructions and calls of Python functions, by function.

`python -m bench.instructions [--aio] URL`. Unlike times, these counts hardly depend on how busy the
machine is, and they add up. `--pairs N` runs that many pairs without counting: under `strace -f -c` it shows the system
calls.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from leasehold import AsyncClient, Client

WARM_UP = 20  # connects, prepares statements, starts the watchdog
COUNTED = 100


class InstructionCounter:
    """A tracer of this thread that counts by code object."""

    def __init__(self) -> None:
        self.instructions: Counter[CodeType] = Counter()
        self.calls: Counter[CodeType] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> InstructionCounter:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self.calls[frame.f_code] += 1
        elif event == "opcode":
            self.instructions[frame.f_code] += 1
        return self

    @contextmanager
    def counting(self) -> Iterator[None]:
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)

    def report(self, pairs: int) -> str:
        rows = [
            f"{count / pairs:8.1f} {self.calls[code] / pairs:6.2f}  {_place(code)}"
            for code, count in self.instructions.most_common()
            if count >= pairs / 10
        ]
        total = f"{self.instructions.total() / pairs:8.1f} {self.calls.total() / pairs:6.2f}  together"
        return "\n".join(["instr.   calls  function, per pair", *rows, total])


def _place(code: CodeType) -> str:
    return f"{'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_qualname}"


def run_pairs(lock: Any, pairs: int) -> None:
    for _ in range(pairs):
        with lock:
            pass


async def await_pairs(lock: Any, pairs: int) -> None:
    for _ in range(pairs):
        async with lock:
            pass


def count(url: str, counter: InstructionCounter) -> None:
    with Client(url) as client:
        lock = client.lock("bench")
        run_pairs(lock, WARM_UP)
        with counter.counting():
            run_pairs(lock, COUNTED)


async def count_awaited(url: str, counter: InstructionCounter) -> None:
    async with AsyncClient(url) as client:
        lock = client.lock("bench")
        await await_pairs(lock, WARM_UP)

        async def counted() -> None:
            with counter.counting():
                await await_pairs(lock, COUNTED)

        await asyncio.create_task(counted())  # a tracer sees only frames that begin after it was set


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.instructions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--aio", action="store_true", help="count pairs of AsyncClient, with those of the event loop")
    parser.add_argument("--pairs", type=int, metavar="N", help="only run N pairs, for strace")
    chosen = parser.parse_args()
    if chosen.pairs is not None:
        with Client(chosen.url) as client:
            run_pairs(client.lock("bench"), chosen.pairs)
        return
    counter = InstructionCounter()
    if chosen.aio:
        asyncio.run(count_awaited(chosen.url, counter))
    else:
        count(chosen.url, counter)
    print(counter.report(COUNTED))


if __name__ == "__main__":
    main()
