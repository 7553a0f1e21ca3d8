"""Security checks that are no part of `make check`, because one of them needs a database on the network: bandit over
`src`, and pip-audit over the packages that an installation with all extras brings.

Fails if bandit finds anything of medium severity or above, or if a package has a known vulnerability. Says which
packages could not be checked: without the network, that is all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

BANDIT = ["bandit", "-q", "-r", "src", "--severity-level", "medium", "-f", "json"]


def code_findings() -> list[str]:
    """What bandit finds, but for lines that are exempt from the same rule of ruff's, with a reason: `noqa: S608`."""
    done = subprocess.run([sys.executable, "-m", *BANDIT], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    found = [str(error) for error in report["errors"]]
    for each in report["results"]:
        lines = Path(each["filename"]).read_text(encoding="utf-8").splitlines()
        if not any(f"noqa: S{each['test_id'][1:]}" in lines[number - 1] for number in each["line_range"]):
            found.append(f"{each['filename']}:{each['line_number']}: {each['test_id']} {each['issue_text']}")
    return found


def runtime_packages(name: str = "leasehold", found: dict[str, str] | None = None) -> dict[str, str]:
    """The installed packages that this one needs, with its extra `all`, and their versions."""
    from packaging.requirements import Requirement

    found = {} if found is None else found
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        extras = {"", "binary"}  # psycopg's
        if name == "leasehold":
            extras |= set(distribution(name).metadata.get_all("Provides-Extra", [])) - {"dev"}
        needed = requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in extras)
        if needed and requirement.name not in (*found, "leasehold"):
            found[requirement.name] = distribution(requirement.name).version
            runtime_packages(requirement.name, found)
    return found


def audit(packages: dict[str, str]) -> list[dict[str, Any]]:
    """What pip-audit says of each package."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
        command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "-f", "json", "-r", str(listed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        dependencies: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:  # the database cannot be reached
        reason = done.stderr.strip().splitlines()[-1:] or ["no answer"]
        return [{"name": name, "skip_reason": reason[0]} for name in packages]
    return dependencies


def main() -> int:
    found = code_findings()
    failed = bool(found)
    print("\n".join(found) or "bandit: nothing of medium severity or above")
    for package in audit(runtime_packages()):
        name, version = package["name"], package.get("version", "")
        if package.get("skip_reason"):
            print(f"{name}: NOT CHECKED: {package['skip_reason']}")
        for vulnerability in package.get("vulns", ()):
            failed = True
            print(f"{name} {version}: {vulnerability['id']}, fixed in {', '.join(vulnerability['fix_versions'])}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
