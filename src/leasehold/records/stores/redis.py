"""Records as keys of Redis: one server, the primary behind sentinels, or a cluster.

Redis deletes expired records itself. A record is lost if Redis loses its last writes: in a crash without `appendfsync
always`, in a failover, by eviction. The work is then done again. With `min_replicas=N` in the URL a write counts once
N replicas have it.
"""

from __future__ import annotations

from typing import Final, cast

from leasehold.core.names import FORMAT
from leasehold.engines.redis.engine import RedisEngine
from leasehold.engines.redis.executor import Executor, ScriptCall
from leasehold.engines.redis.scripts import Script, make_script
from leasehold.engines.redis.server import encode_command
from leasehold.errors import Unavailable
from leasehold.records.store import MAX_DATA, VERSION_LENGTH, Record
from leasehold.records.stores.engine_store import EngineStore, encode_record, parse_record

# A table: not a string, or an error, such as a missing permission. Returned by a script, it is an error reply.
_GET: Final = """\
local value = redis.pcall('get', KEYS[1])
if type(value) == 'table' and string.sub(value.err, 1, 9) ~= 'WRONGTYPE' then return value end
"""

# KEYS: the record. Reply: version and data, or nil; empty if another program wrote what is there.
_READ: Final = make_script(
    "read_record",
    f"""#!lua flags=no-writes
{_GET}\
if type(value) == 'table' or (value and #value > {VERSION_LENGTH + MAX_DATA}) then return '' end
return value
""",
)

# KEYS: the record. ARGV: the version it must have, empty for none; the new value; milliseconds to keep it, 0 for ever.
# Reply 1: written. A repeated write finds its own version and writes again, so that WAIT has something to wait for.
_WRITE: Final = make_script(
    "write_record",
    f"""#!lua
{_GET}\
if type(value) == 'table' or value == '' then return 0 end -- another program wrote it: no record, but not to be lost
local version = value and string.sub(value, 1, 32) or ''
if version ~= ARGV[1] and version ~= string.sub(ARGV[2], 1, 32) then return 0 end
if ARGV[3] == '0' then redis.call('set', KEYS[1], ARGV[2])
else redis.call('set', KEYS[1], ARGV[2], 'px', ARGV[3]) end
return 1
""",
)


class RedisStore(EngineStore):
    engine_type = RedisEngine

    async def read(self, key: str, seconds: float) -> Record | None:
        executor, deadline = self._executor(), self._runtime.now() + seconds
        reply, _ = await executor.execute_with_retries(_call(_READ, key, (), deadline))
        return None if reply is None else parse_record(reply)

    async def write(self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float) -> bool:
        executor, deadline = self._executor(), self._runtime.now() + seconds
        ttl_ms = 0 if keep is None else max(1, round(keep * 1000))
        arguments = expected_version, encode_record(record), ttl_ms
        # Not repeated after a lost answer: the record may have been written and replaced meanwhile. `RecordAccess.swap`
        # finds out by its version.
        call = _call(_WRITE, key, arguments, deadline)._replace(retries_left=0, confirm=True)
        reply, confirmed = await executor.execute_with_retries(call)
        if reply not in (0, 1):
            raise Unavailable("the Redis server sent an invalid reply", engine="redis")
        if reply == 1 and not confirmed:
            raise Unavailable(
                f"the Redis server could not confirm that {executor.min_replicas} of its replicas have this record",
                engine="redis",
            )
        return bool(reply == 1)

    def _executor(self) -> Executor:
        return cast(RedisEngine, self._engine()).executor


def _call(script: Script, key: str, arguments: tuple[bytes | str | int, ...], deadline: float) -> ScriptCall:
    tag = f"{{{key}}}"  # decides which node of a cluster has the record
    packed = encode_command("EVALSHA", script.sha, 1, f"{FORMAT}:record:{tag}", *arguments)
    return ScriptCall(tag, script, packed, deadline)


open_on_engine = RedisStore.open
