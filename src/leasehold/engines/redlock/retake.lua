#!lua
-- Take this node's part of a grant that a majority has, and this node lost, never had, or has by another token: see
-- renewing.py. Where that cannot be, leave its line: the claim waits for nothing.
-- ARGV  1 mark  2 number: of this request  3 token  4 until: unless 0, the last instant of this server's clock to do it
--       5 ttl  6 delay  7 queue, which means nothing here  8 terms: as in attempt.lua
-- Reply 1: taken; 0: somebody else has it, or it is too late
local raw = redis.call('GET', NAME)
local line, mark, number = raw and cmsgpack.unpack(raw), ARGV[1], tonumber(ARGV[2])
local token, til, ttl, delay = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local _, _, _, _, _, _, client, holder = cmsgpack.unpack(ARGV[8])
--@ machine.lua

settle()
local own = find(mark)
if most ~= 0 or (til > 0 and now > til) or (own and (own.number or 0) > number) then
  advance()
  save()
  return 0
end
if own then remove(own) end
local first, done = occupiers[1], 0
if first and first.state == RESERVED then  -- its turn has not come after all: back to its place
  vacate(first)
  first.state, first.token = WAITING, 0
  queue(first)
  keep(first)
end
if #occupiers == 0 then
  local p = {mark = mark, ticket = 0, shared = 0, delay = delay, beat = 0, client = client, holder = holder,
    number = number}
  occupy(p, HELD, now + ttl)
  if tonumber(redis.call('GET', COUNTER)) < token then redis.call('SET', COUNTER, whole(token)) end
  p.token, done = token, 1
end
advance()
save()
return done
