"""The engines on which the integrations are tested with real servers."""

import os
import uuid

import pytest

from leasehold.testing.conformance.rig import Absent


@pytest.fixture(params=["sqlite", "redis", pytest.param("postgresql", marks=pytest.mark.faults)])
def engine_variables(request, tmp_path) -> dict[str, str]:
    """The URL of an engine and a namespace of the test, for child processes."""
    try:
        match request.param:
            case "redis":
                from harness.rigs.redis import single_server

                url = f"redis://127.0.0.1:{single_server()[0].port}"
            case "postgresql":
                from harness.rigs.postgresql import server

                url = server().url()
            case _:
                url = f"sqlite://{tmp_path}/locks.db"
    except Absent as absent:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(absent))
    return {"LEASEHOLD_URL": url, "LEASEHOLD_NAMESPACE": uuid.uuid4().hex}
