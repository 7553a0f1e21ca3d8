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

# ruff checks the same with a reason on each line: statements made of constants (S608), a folder for a group (S103).
BANDIT = ["bandit", "-q", "-r", "src", "--severity-level", "medium", "--skip", "B608,B103"]


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
    failed = subprocess.run([sys.executable, "-m", *BANDIT], check=False).returncode != 0
    print(f"bandit: {'see above' if failed else 'nothing of medium severity or above'}")
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
