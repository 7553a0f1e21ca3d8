"""The audit log: who was granted which name, with which token, how the grant ended, and who broke it or was refused.

    client = leasehold.Client(url, on_event=leasehold.telemetry.AuditFile("/var/log/leasehold/audit.jsonl"))

chain.py    one record as one line of JSON, bound to the line before by its hash
file.py     the file: appending, several writers, rotation; the hook
tail.py     where a file ends, also after a crash
verify.py   whether files are complete and unchanged
history.py  the grants of a name, assembled from records
"""

from __future__ import annotations

from leasehold.telemetry.audit.file import AuditFile

__all__ = ["AuditFile"]
