"""What `leasehold doctor` finds, in this process."""

from dataclasses import replace

from leasehold import Client
from leasehold.cli.doctor.findings import Finding
from leasehold.cli.doctor.servers import check_servers
from leasehold.engines.probe import Health
from tests.support import probe_cli

SPEED = frozenset({"round trip", "hand-off", "disk"})  # findings that a busy machine has as well


def examine(url: str) -> list[Finding]:
    with Client(url) as client:
        return list(probe_cli.examine(client))


def unsafe(url: str) -> dict[str, str]:
    """The checks with a warning or danger -> the text, without those that depend on the machine's speed."""
    return {
        each.check: each.found
        for each in examine(url)
        if each.severity in ("warning", "danger") and each.check not in SPEED
    }


def encryption_from_afar(health: Health) -> list[tuple[str, str]]:
    """(severity, text) of the check of encryption, if the same server had an address of the network."""
    (member,) = health.members
    moved = replace(health, members=(replace(member, member="10.0.0.5:1"),))
    found = [each for each in check_servers(moved, health.engine) if each.check == "encryption"]
    assert all(each.severity == "ok" or (each.fix and each.promise == "E5") for each in found)
    return [(each.severity, each.found) for each in found]
