"""Twelve crawlers, with a client each as if on machines of their own: at most two requests per site at a time."""

import asyncio
import tempfile
from collections import Counter

import leasehold

SITES = ["a.example", "b.example"]
open_requests: Counter[str] = Counter()
most: Counter[str] = Counter()


async def fetch(site: str, page: int) -> None:
    """Simulate a request, and count how many a site has at once."""
    open_requests[site] += 1
    most[site] = max(most[site], open_requests[site])
    await asyncio.sleep(0.02 + page % 3 / 100)
    open_requests[site] -= 1


async def crawl(url: str, number: int) -> None:
    async with leasehold.AsyncClient(url, holder=f"crawler-{number}") as client:
        for page in range(3):
            site = SITES[(number + page) % len(SITES)]
            async with client.semaphore(f"site/{site}", limit=2, wait=60) as lease:
                lease.check()
                await fetch(site, page)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.gather(*(crawl(f"sqlite://{folder}/locks.db", number) for number in range(12)))
    for site in SITES:
        print(f"{site}: at most {most[site]} requests at once")
    if max(most.values()) > 2:
        raise SystemExit("a site had too many requests at once")


asyncio.run(main())
