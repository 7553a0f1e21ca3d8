"""A process that writes audit records until it is told to stop, or killed.

audit_child.py FILE SERVER COUNT [LIMIT]   COUNT 0: without end. LIMIT: bytes that fit into a file
"""

import resource
import signal
import sys

from leasehold.telemetry import AuditFile

path, server, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if sys.argv[4:]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
audit = AuditFile(path, server=server, sync="none")
print("ready", flush=True)
number = 0
while not count or number < count:
    number += 1
    audit.write("grant", namespace="shop", name=f"orders/{number}", token=number, holder=server, purpose="x" * 500)
    try:
        audit.flush()
    except OSError:
        print("full", flush=True)
        sys.stdin.readline()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
audit.close()
