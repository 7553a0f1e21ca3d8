"""Metrics in a registry of prometheus-client, beside those of the program:

client = leasehold.Client(url, on_event=Prometheus())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from leasehold.errors import ConfigError
from leasehold.telemetry.families import Family, Source
from leasehold.telemetry.groups import group_of
from leasehold.telemetry.metrics import Metrics

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import Metric
except ImportError as error:
    raise ConfigError('this needs prometheus-client: pip install "leasehold[prometheus]"') from error


class _Collector:
    """What a registry needs of a source of metrics."""

    def families(self) -> Iterable[Family]:
        raise NotImplementedError

    def collect(self) -> Iterable[Metric]:
        """All metrics, computed now."""
        return map(_to_metric, self.families())

    describe = collect  # the registry compares names

    def _register(self, registry: CollectorRegistry) -> None:
        try:
            registry.register(self)
        except ValueError as error:
            raise ConfigError(
                "this registry already has these metrics: pass one hook to all clients, or another registry"
            ) from error


class Prometheus(Metrics, _Collector):
    """A hook that keeps metrics, and the collector that a registry asks for them.

    registry    where the metrics are registered; by default prometheus_client.REGISTRY
    group       function from a lock's name to the label `group`; by default the name without its ids. A lock that was
                built with `group=` has that one
    max_groups  after this many pairs of namespace and group, new ones are counted as `other`
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        group: Callable[[str], str] = group_of,
        max_groups: int = 30,
    ) -> None:
        super().__init__(group=group, max_groups=max_groups)
        self._register(registry)


class Collector(_Collector):
    """Registers metrics that no event counts, such as `EngineHealth`, with prometheus-client."""

    def __init__(self, source: Source, registry: CollectorRegistry = REGISTRY) -> None:
        self.families = source.families  # type: ignore[method-assign]
        self._register(registry)


def _to_metric(family: Family) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    for sample in family.samples:
        metric.add_sample(sample.name, dict(sample.labels), sample.value)
    return metric
