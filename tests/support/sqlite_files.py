"""What tests do with SQLite files whose contents another user has made."""

from leasehold import Client

ENDLESS = "with recursive n (x) as (select 1 union all select x + 1 from n) select x from n"


def try_lock(client: Client) -> None:
    client.lock("a").acquire(wait=0).release()
