#!lua flags=allow-oom
-- Renew the grants and the queued claims of one name (E5, E7). allow-oom: a full server must not cost leases.
-- ARGV  1 number: of this request; then for each claim: id hash, token (0: queued), ttl
-- Reply for each claim two numbers: life (-1: unknown, -2: expired) and position (-1: not waiting); then this server's
--       clock
local raw = redis.call('GET', NAME)
local lock_state = raw and cmsgpack.unpack(raw)
--@ lock_state.lua
--@ renew_claims.lua

local answers = renew_claims(2, tonumber(ARGV[1]))
answers[#answers + 1] = now
return answers
