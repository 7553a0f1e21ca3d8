#!lua flags=allow-oom
-- Have this node's counter reach the token agreed on, while the claim still holds here: see agreement.py.
-- ARGV  1 mark  2 token  3 number: of this request
-- Reply 1: so it is; 0: the claim does not hold here any more, or its token here is higher
--@ clock_limits.lua
local raw = redis.call('GET', NAME)
if not raw then return 0 end
local lock_state = cmsgpack.unpack(raw)
local token, number = tonumber(ARGV[2]), tonumber(ARGV[3])
--@ lock_state.lua

expire_holders()
advance_queue()
local entry, done = holders_by_hash[ARGV[1]], 0
if entry and entry.state == HELD and entry.token <= token and token <= now + 2 * DAY then
  if tonumber(redis.call('GET', COUNTER) or 0) < token then redis.call('SET', COUNTER, format_integer(token)) end
  entry.token, entry.number, changed, done = token, math.max(entry.number or 0, number), true, 1
end
save()
return done
