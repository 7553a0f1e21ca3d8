#!lua flags=allow-oom
-- Release a claim on this node, held or queued (E6), or requeue it.
-- ARGV  1 id hash; then, only if they are not 1, 1, 0 and 0:
--       2 keep: 0 if min_hold does not apply  3 held: 0 ends a position or a reservation, never a grant
--       4 max_number: unless 0, do nothing if a request with a higher number has arrived since, or one of another client,
--         whose clock gives its numbers
--       5 ticket: unless 0, requeue the claim with this ticket  6 client: compared if there is a max_number
-- Reply 1: this call ended a grant or a reservation; 2: and the node then reserved the name for this claim; 0: there
--       was none
--@ node_preamble.lua
--@ release_uncontended.lua
--@ lock_state.lua
--@ end_claim.lua

local max_number, ticket = tonumber(ARGV[4] or 0), tonumber(ARGV[5] or 0)
expire_holders()
local entry = find(ARGV[1])
if entry and entry.state == HELD and ARGV[3] == '0' then entry = nil end
if entry and max_number > 0 and (entry.client ~= ARGV[6] or (entry.number or 0) > max_number) then entry = nil end
local ended = entry and entry.token > 0
if entry and ticket > 0 then
  if ended then
    remove_holder(entry)
    if not head() and redis.call('EXISTS', WAITERS) == 0 then next_waiter_scan = now + WAITER_TTL end
    entry.state, entry.token, entry.slot, entry.expires_at, entry.ticket, entry.heartbeat_expires_at, last_ticket =
      WAITING, 0, -1, 0, clamp_ticket(ticket), now + WAITER_TTL, 1
    enqueue(entry)
    write_waiter(entry)
  end
elseif entry then
  release_claim(entry, ARGV[2] ~= '0')
end
advance_queue(ticket > 0 and entry or nil)
save()
return ended and (ticket > 0 and entry.state == RESERVED and 2 or 1) or 0
