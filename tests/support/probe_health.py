"""What tests read inside the engines' health probes: how they read what servers answer."""

from __future__ import annotations

from leasehold.engines.etcd import health as etcd
from leasehold.engines.postgresql import health as postgresql
from leasehold.engines.remote import health as remote
from leasehold.engines.zookeeper import health as zookeeper

etcd_samples = etcd._SAMPLES
lock_server_engine = remote._ENGINE
parse_tables = postgresql._tables
zookeeper_fields = zookeeper._FIELDS
