#!lua
-- Set the limit of a semaphore: it counts for every claim on the name, whatever the claim says, until it is set again
-- (E1). A smaller limit ends no grant. It withdraws reservations, since claiming one would make a grant.
-- ARGV  1 limit; 0: remove it, so that the next claim decides again once the name is idle
-- Reply 1: done; 0: the name is in use as a lock
local raw = redis.call('GET', NAME)
if not raw and ARGV[1] == '0' then return 1 end
local lock_state = raw and cmsgpack.unpack(raw)
--@ lock_state.lua

expire_holders()
local limit = tonumber(ARGV[1])
if limit == 0 then
  limit_set = false
else
  expire_waiters()  -- dead waiters must not keep the name's kind
  if semaphore_limit == 0 and not is_idle() then
    save()
    return 0
  end
  semaphore_limit, limit_set = limit, true
  for n = #holders, 1, -1 do
    local entry = holders[n]
    if #holders > limit and entry.state == RESERVED then
      pass_over(entry)
      entry.state, notified_head, notified_recheck_at = WAITING, '', 0  -- a new head is notified when to re-check
      enqueue(entry)
      write_waiter(entry)
    end
  end
end
changed = true
advance_queue()
save()
return 1
