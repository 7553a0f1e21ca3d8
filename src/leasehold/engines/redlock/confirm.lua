#!lua flags=allow-oom
-- Have this node's counter reach the token agreed on, while the claim still holds here: see agreement.py.
-- ARGV  1 mark  2 token  3 number: of this request
-- Reply 1: so it is; 0: the claim does not hold here any more, or its token here is higher
--@ limits.lua
local raw = redis.call('GET', NAME)
if not raw then return 0 end
local line = cmsgpack.unpack(raw)
local token, number = tonumber(ARGV[2]), tonumber(ARGV[3])
--@ machine.lua

settle()
advance()
local p, done = owners[ARGV[1]], 0
if p and p.state == HELD and p.token <= token and token <= now + 2 * DAY then
  if tonumber(redis.call('GET', COUNTER) or 0) < token then redis.call('SET', COUNTER, whole(token)) end
  p.token, p.number, changed, done = token, math.max(p.number or 0, number), true, 1
end
save()
return done
