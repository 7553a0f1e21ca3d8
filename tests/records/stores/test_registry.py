"""Every engine has a store, or an error that says which store to pass; and its guarantees page says so."""

from pathlib import Path

import pytest

from leasehold import Client, ConfigError, engines
from leasehold.records import stores
from tests.records.stores.conftest import KINDS

PAGE_NAMES = {"remote": "server"}  # a page for servers, whose client is the remote engine
PAGES = Path(__file__).parents[3] / "docs" / "guarantees"


@pytest.mark.parametrize("scheme", engines.BUILT_IN)
def test_engine_has_a_store_or_an_error_that_names_one(scheme, tmp_path):
    target = {"sqlite": f"{tmp_path}/x.db", "redlock": "a:1,b:2,c:3", "redis+sentinel": "a/s", "redis+unix": "/a.sock"}
    url = f"{scheme}://{target.get(scheme, 'a/b' if scheme in ('mysql', 'mariadb', 'postgresql') else 'a')}"
    with Client(url) as client:
        calls = (
            lambda: client.once("k", lambda: 1),
            lambda: client.schedule("s", 60),
            lambda: client.status("o", {"new": {"paid"}}, "new"),
        )
        if scheme in stores.BUILT_IN:
            client.schedule("s", 60)
            client.status("o", {"new": {"paid"}}, "new")
            return
        for call in calls:
            with pytest.raises(ConfigError, match=f'{scheme}:// keeps no records: pass store="postgresql://.*redis://'):
                call()


def test_every_store_is_tested():
    """Schemes that share a module differ only in TLS and spelling; Sentinel and Cluster are tested on their own."""
    tested = {stores.BUILT_IN[kind] for kind in KINDS}
    assert set(stores.BUILT_IN.values()) == tested
    assert {"redis+sentinel", "redis+cluster"} <= set(KINDS)


@pytest.mark.parametrize("engine", sorted({module.rpartition(".")[2] for module in engines.BUILT_IN.values()}))
def test_guarantees_page_says_what_the_store_promises(engine):
    records = (
        (PAGES / f"{PAGE_NAMES.get(engine, engine)}.md").read_text().partition("### Records")[2].partition("\n## ")[0]
    )
    assert "stores.md" in records
    has_store = any(module.endswith(f".{engine}") for module in stores.BUILT_IN.values())
    assert ("S1" in records) if has_store else ("store=" in records)
