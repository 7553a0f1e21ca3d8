"""The OpenAPI document: committed as it is made, and true."""

import json
from pathlib import Path

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS

from leasehold.server import app, openapi, problems
from tests.support.paths import ROOT

HEALTH = list(HealthCheck)
# Not that every request that fits the schema is accepted: a name of 255 letters may have more bytes than that.
CHECKED = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
PAGE = ROOT / "docs" / "server" / "openapi.json"


def current() -> str:
    return msgspec.json.format(msgspec.json.encode(openapi.document())).decode() + "\n"


def test_committed_document_is_the_current_one():
    assert PAGE.read_text() == current(), f"run: python {Path(__file__).relative_to(ROOT)}"


def test_every_path_is_served_and_described(memory_server):
    served = memory_server.get("/openapi.json").json
    assert served == json.loads(current())
    assert set(served["paths"]) == set(app.ROUTES)


def test_every_kind_of_problem_can_occur_somewhere():
    described = {kind for methods in app.ROUTES.values() for route in methods.values() for kind in route.problems}
    assert set(problems.KINDS) - described == {"not-found", "method-not-allowed"}


# Streams do not end, and the calls of remote engines have tests of their own.
FUZZED = sorted(set(app.ROUTES) - {"/v1/stream", "/v1/events", "/v1/calls", "/metrics"})


@pytest.mark.parametrize(
    "examples", [5, pytest.param(25, marks=pytest.mark.extended), pytest.param(10_000, marks=pytest.mark.faults)]
)
@pytest.mark.parametrize("path", FUZZED)
def test_fuzzed_requests_get_the_answers_described(memory_server, path, examples):
    """Whatever the document permits: no 5xx, and statuses, media types and bodies as it says."""
    document = json.loads(current())
    (method,) = document["paths"][path]
    operation = schemathesis.openapi.from_dict(document)[path][method]

    checks = [check for check in CHECKS.get_all() if check.__name__ in CHECKED]
    assert len(checks) == len(CHECKED)

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=HEALTH)
    @given(case=operation.as_strategy())
    def check(case):
        if isinstance(case.body, dict):  # a wait of minutes is no news
            case.body["wait"] = min(case.body["wait"], 0.01) if "wait" in case.body else 0
            if path != "/v1/acquire":
                del case.body["wait"]
        case.call_and_validate(base_url=f"http://127.0.0.1:{memory_server.port}", timeout=60, checks=checks)

    check()


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(current())
