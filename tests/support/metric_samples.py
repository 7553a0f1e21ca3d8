"""What a Prometheus text file says."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families


def samples(path: Path) -> dict[str, float]:
    """Samples by name and label values, without buckets."""
    families = text_string_to_metric_families(path.read_text())
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }
