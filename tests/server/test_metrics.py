"""What `/metrics` of a lock server shows beside its requests."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.support.running_server import poll


def test_metrics_show_the_health_of_the_engine(server):
    """On every engine, without waiting for a probe."""

    def families():
        found = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").body.decode())}
        return found if "leasehold_engine_up" in found else None

    found = poll(families)
    scheme = server.url.partition(":")[0]
    (up,) = found["leasehold_engine_up"].samples
    assert (up.labels, up.value) == ({"engine": scheme}, 1)
    assert "leasehold_server_requests" in found
    if scheme == "redis":
        assert {sample.labels["version"] for sample in found["leasehold_engine_info"].samples} != {""}
