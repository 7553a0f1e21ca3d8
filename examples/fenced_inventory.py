"""A holder is paused for longer than its ttl, another holder sells the last teapot, and the late write is refused."""

import sqlite3

import leasehold
from leasehold import fences

shop = sqlite3.connect(":memory:")
shop.execute("CREATE TABLE stock (item TEXT PRIMARY KEY, quantity INTEGER NOT NULL, fence BIGINT NOT NULL DEFAULT 0)")
shop.execute("INSERT INTO stock (item, quantity) VALUES ('teapot', 1)")
shop.commit()
stock = fences.SQLColumn(shop, "stock", key="item")

with leasehold.Client("memory://") as client:
    paused = client.lock("stock/teapot", purpose="web-1").acquire()
    (seen,) = stock.read(paused, "teapot", "quantity")
    print(f"web-1 (token {paused.token}) sees {seen} teapot, and is paused")

    client.break_lock("stock/teapot", token=paused.token, why="simulates a ttl that is over")
    with client.lock("stock/teapot", purpose="web-2") as lease:
        stock.write(lease, "teapot", quantity=seen - 1)
        print(f"web-2 (token {lease.token}) sells it")

    try:
        stock.write(paused, "teapot", quantity=seen - 1)
        raise SystemExit("the teapot was sold twice")
    except (leasehold.StaleToken, leasehold.LeaseLost) as refused:
        print(f"web-1 wakes up and tries to sell it again: {type(refused).__name__}: {refused}")

print("left:", *shop.execute("SELECT quantity FROM stock").fetchone())
