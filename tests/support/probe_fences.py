"""What tests read and change inside fences, and inside drivers to which a fence must adapt."""

from __future__ import annotations

from typing import Any

from leasehold import fences
from leasehold.fences import File, HTTPObjects
from leasehold.fences.etcd import EtcdLockFence
from leasehold.fences.token_file import TokenFile
from leasehold.fences.zookeeper import ZooKeeperLockFence
from tests.support.probe import Place

PUBLIC_NAMES = fences._MODULES  # and the module that each one is loaded from
LOCK_NODE_PATH = Place(ZooKeeperLockFence, "_lock_node_path")  # finds the node of the lease's lock
OPEN = Place(TokenFile, "_open")
REPLACE = Place(File, "_replace")  # the file by its new content


def gateway(fence: EtcdLockFence) -> Any:
    """What sends the fence's requests to etcd."""
    return fence._gateway


def url_of(objects: HTTPObjects) -> str:
    """The URL below which the objects are."""
    return objects._url


def use_cursor_class(connection: Any, cursor_class: type) -> None:
    """Set what `connection.cursor()` makes: PyMySQL and aiomysql have different names for it."""
    connection.cursorclass = connection._cursorclass = cursor_class


async def set_isolation_level(connection: Any, level: str | None) -> None:
    """Of a connection of aiosqlite, in its thread."""
    await connection._execute(setattr, connection._conn, "isolation_level", level)
