"""The recipe for arq without arq, which needs an older redis-py than the other tests: see `test_task_queues.py`."""

import asyncio
import re
import runpy
import sys
from types import ModuleType, SimpleNamespace

import pytest

import leasehold
from tests.support.paths import ROOT


class Retry(Exception):
    def __init__(self, defer):
        self.defer = defer


@pytest.mark.parametrize("error", [leasehold.NotAcquired("import:7"), leasehold.Unavailable("no answer")], ids=type)
def test_arq_is_told_to_retry_a_job_that_did_not_begin(tmp_path, monkeypatch, error) -> None:
    """arq gives up a job that raises anything else. An engine that was away for a second lost the job."""
    arq, connections = ModuleType("arq"), ModuleType("arq.connections")
    arq.Retry, connections.RedisSettings = Retry, SimpleNamespace(from_dsn=str)
    monkeypatch.setitem(sys.modules, "arq", arq)
    monkeypatch.setitem(sys.modules, "arq.connections", connections)
    section = (ROOT / "docs" / "integrations" / "task-queues.md").read_text().partition("\n## arq\n")[2]
    snippet = re.search(r"```python\n(.*?)```", section, re.S)[1]
    (tmp_path / "jobs.py").write_text(snippet.replace("redis://localhost", "memory://"))
    recipe = runpy.run_path(str(tmp_path / "jobs.py"))

    class Refused:
        async def __aenter__(self):
            raise error

        async def __aexit__(self, *_):
            return None

    recipe["client"].lock = lambda *_, **__: Refused()
    with pytest.raises(Retry) as retry:
        asyncio.run(recipe["import_account"]({}, 7))
    assert retry.value.defer == 5
