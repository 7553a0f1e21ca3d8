#!lua flags=allow-oom
-- Raise this node's counter to the agreed token, if the claim still has this node's vote: see quorum.py.
-- ARGV  1 id hash  2 token  3 number: of this request
-- Reply 1: confirmed; 0: the claim no longer has the vote, or its token here is higher
--@ node_preamble.lua
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
