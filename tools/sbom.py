"""The software bill of materials of a release, as CycloneDX 1.6.

The wheel contains no code of others. So the SBOM lists what it declares: required and optional packages with the
versions that they may have, and the tools that built it with the hashes that they were checked against.
"""

from __future__ import annotations

import email
import hashlib
import json
import re
import uuid
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BUILD_TOOLS = Path(__file__).with_name("build-requirements.txt")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;\s*(?:\(.*\) and )?extra == '([^']+)')?")


def document(wheel: Path, sdist: Path, epoch: int) -> str:
    """The SBOM as JSON: the same text for the same files."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    version = metadata["Version"]
    subject = {
        "type": "library",
        "bom-ref": _purl("leasehold", version),
        "name": "leasehold",
        "version": version,
        "description": metadata["Summary"],
        "licenses": [{"license": {"id": metadata["License-Expression"]}}],
        "purl": _purl("leasehold", version),
        "externalReferences": [
            {"type": "distribution", "url": path.name, "hashes": [_hash(hashlib.sha256(path.read_bytes()).hexdigest())]}
            for path in (wheel, sdist)
        ],
    }
    packages = declared(metadata.get_all("Requires-Dist", []))
    components = [_package(name, *found) for name, found in sorted(packages.items())]
    made: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, hashlib.sha256(wheel.read_bytes()).hexdigest())}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycles": [{"phase": "build"}],
            "tools": {"components": [_tool(*found) for found in build_tools()]},
            "component": subject,
        },
        "components": components,
        "dependencies": [
            {"ref": subject["bom-ref"], "dependsOn": [each["bom-ref"] for each in components]},
            *({"ref": each["bom-ref"]} for each in components),
        ],
    }
    return json.dumps(made, indent=2) + "\n"


def declared(requirements: list[str]) -> dict[str, tuple[str, list[str]]]:
    """Package -> permitted versions and the extras that need it. Not those of `dev`, and not Leasehold's own extras."""
    found: dict[str, tuple[str, list[str]]] = {}
    for text in requirements:
        match = _REQUIREMENT.fullmatch(text)
        assert match is not None, text
        name, versions, extra = match[1].lower(), match[2].strip(), match[3]
        if name == "leasehold" or extra == "dev":
            continue
        known, extras = found.setdefault(name, (versions, []))
        assert known == versions, f"{name}: {known} and {versions}"
        extras += [extra] if extra else []
    return found


def build_tools() -> list[tuple[str, str, str]]:
    """Name, version and SHA-256 of each pinned tool."""
    return re.findall(r"(?m)^([\w.-]+)==(\S+) \\\n    --hash=sha256:([0-9a-f]{64})$", BUILD_TOOLS.read_text())


def _package(name: str, versions: str, extras: list[str]) -> dict[str, Any]:
    properties = [{"name": "leasehold:versions", "value": versions}]
    properties += [{"name": "leasehold:extra", "value": extra} for extra in extras]
    return {
        "type": "library",
        "bom-ref": _purl(name),
        "name": name,
        "scope": "optional" if extras else "required",
        "purl": _purl(name),
        "properties": properties,
    }


def _tool(name: str, version: str, sha256: str) -> dict[str, Any]:
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": _purl(name, version),
        "hashes": [_hash(sha256)],
    }


def _purl(name: str, version: str = "") -> str:
    return f"pkg:pypi/{name}" + (f"@{version.replace('+', '%2B')}" if version else "")


def _hash(sha256: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": sha256}
