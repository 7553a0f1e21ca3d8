"""What `leasehold doctor` finds, in this process."""

from leasehold import Client
from leasehold.cli.doctor.command import _examine
from leasehold.cli.doctor.findings import Finding


def examine(url: str) -> list[Finding]:
    with Client(url) as client:
        return list(_examine(client))


def unsafe(url: str) -> dict[str, str]:
    """The checks with a warning or danger -> the text."""
    return {each.check: each.found for each in examine(url) if each.severity in ("warning", "danger")}
