#!lua flags=no-writes
-- Everything stored about one name; the client decides what has expired.
-- Reply {now, semaphore_limit, entry...}, entries as lock_state.lua packs them; {now} if the name has none
local raw = redis.call('GET', NAME)
if not raw then return {now} end
local lock_state = cmsgpack.unpack(raw)
local answer = {now, math.abs(lock_state[1])}
for n = 6, #lock_state do answer[#answer + 1] = lock_state[n] end
local waiters = redis.call('HGETALL', WAITERS)
for n = 2, #waiters, 2 do answer[#answer + 1] = cmsgpack.unpack(waiters[n]) end
return answer
