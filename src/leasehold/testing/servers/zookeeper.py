"""ZooKeeper as a plain process."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Final

from leasehold.testing.rig import Absent
from leasehold.testing.servers.process import Server, program

_JARS: Final = (  # by name: all of the folder takes five times as long to load
    *("zookeeper", "zookeeper-jute", "slf4j-api", "slf4j-log4j12", "log4j-1.2", "netty-all", "metrics-core"),
    *("snappy-java", "commons-cli", "commons-io", "jackson-core", "jackson-databind", "jackson-annotations"),
)


class Zookeeper(Server):
    package = "zookeeper"

    def __init__(self, folder: str, port: int) -> None:
        super().__init__(folder, port)
        self._java = program("java", package="zookeeper")
        jars = [f"/usr/share/java/{jar}.jar" for jar in _JARS]
        if not os.path.exists(jars[0]):
            raise Absent("ZooKeeper is not installed: apt-get install zookeeper")
        self._class_path = ":".join(["/etc/zookeeper/conf", *jars])
        lines = {
            "tickTime": 500,
            "dataDir": os.path.join(folder, "data"),
            "clientPort": port,
            "clientPortAddress": "127.0.0.1",
            "maxClientCnxns": 0,
            "4lw.commands.whitelist": "*",
            "admin.enableServer": "false",
        }
        with open(os.path.join(folder, "zoo.cfg"), "w") as written:
            written.writelines(f"{name}={value}\n" for name, value in lines.items())

    def command(self) -> Sequence[str]:
        return [
            *(self._java, "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            *("-Dzookeeper.root.logger=WARN,CONSOLE", "-Dzookeeper.forceSync=no", "-cp", self._class_path),
            *("org.apache.zookeeper.server.quorum.QuorumPeerMain", os.path.join(self.folder, "zoo.cfg")),
        ]

    def ready(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 2) as asked:
            asked.settimeout(2)
            asked.sendall(b"srvr")
            return b"Mode:" in b"".join(iter(lambda: asked.recv(65_536), b""))
