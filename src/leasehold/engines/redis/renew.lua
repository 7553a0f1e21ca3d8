#!lua flags=allow-oom
-- Renew the grants and the queued claims of one name (E5, E7). allow-oom: a full server must not cost leases.
-- ARGV  for each claim: id hash, token (0: queued), ttl
-- Reply for each claim two numbers: life (-1: unknown, -2: expired) and position (-1: not waiting)
local raw = redis.call('GET', NAME)
local lock_state = raw and cmsgpack.unpack(raw)
if raw and #ARGV == 3 and #lock_state == 6 and lock_state[2] == 0 and lock_state[1] >= 0 then  -- one grant, no claim ever queued, no limit set
  local entry = lock_state[6]
  if entry[1] == ARGV[1] and entry[2] == tonumber(ARGV[2]) and entry[3] > now and entry[5] == HELD then
    local expires_at = now + tonumber(ARGV[3])
    if expires_at > entry[3] then entry[3] = expires_at end
    redis.call('SET', NAME, cmsgpack.pack(lock_state), 'PXAT', math.ceil((entry[3] + entry[7]) / 1000) + 1)
    return {entry[3] - now, -1}
  end
end
--@ lock_state.lua
--@ renew_claims.lua

return renew_claims(1)
