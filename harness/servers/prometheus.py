"""A real Prometheus on loopback, with rules, that scrapes what a test names."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from harness.servers.folders import scratch
from harness.servers.process import Server, free_ports, program


class Prometheus(Server):
    """`targets`: ports of this machine by job. `rules`: the text of a rules file."""

    package: ClassVar[str] = "prometheus"

    def __init__(self, targets: Mapping[str, Sequence[int]], rules: str, interval: str = "1s") -> None:
        super().__init__(scratch(), free_ports(1)[0])
        self._program = program("prometheus", package=self.package)
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            for job, ports in targets.items()
        ]
        timing = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
        config = {"global": timing, "rule_files": [self._path("rules.yml")], "scrape_configs": jobs}
        for name, text in (("rules.yml", rules), ("prometheus.yml", json.dumps(config))):  # JSON is YAML
            with open(self._path(name), "w") as file:
                file.write(text)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def command(self) -> Sequence[str]:
        return [
            self._program,
            f"--config.file={self._path('prometheus.yml')}",
            f"--storage.tsdb.path={self._path('data')}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def ready(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its HTTP API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> dict[str, float]:
        """The values of an expression now, by their labels as JSON."""
        found = self.get("query", query=expression)["result"]
        return {json.dumps(each["metric"], sort_keys=True): float(each["value"][1]) for each in found}

    def alerts(self) -> dict[str, str]:
        """The state of each alert: pending or firing."""
        return {each["labels"]["alertname"]: each["state"] for each in self.get("alerts")["alerts"]}


def run_tool(name: str, package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run promtool or amtool. Raises `Absent` if it is not installed."""
    command = [program(name, package=package), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
