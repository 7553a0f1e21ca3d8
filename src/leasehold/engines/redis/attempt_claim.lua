-- An attempt at a name that has a holder or a waiter, or may have several holders: for both engines (E1, E2, E8).
-- claim: id_hash, ttl, delay, min_hold, limit, shared, queue, client, holder; with Redlock also number, proposal and
-- ticket, which its clients choose. Returns the grant's entry and its life; else nil and the reply.

local function busy(entry)
  local first_ending = first_to_expire()
  local position = entry and position_of(entry) or -1
  local subscribed = (not entry or is_reachable(entry.client)) and 1 or 0
  save()
  if not first_ending then return {0, -1, position, 0, '', subscribed} end
  local next_attempt_at = position == 0 and recheck_at() or first_ending.expires_at
  return {0, next_attempt_at - now, position, first_ending.token, first_ending.holder, subscribed}
end

local function attempt_claim(claim)
  expire_holders()
  if claim.limit ~= semaphore_limit and not (limit_set and claim.limit > 0) then
    expire_waiters()  -- dead waiters must not keep the name's kind
    if limit_set or not is_idle() then
      save()
      return nil, {-1, semaphore_limit}
    end
    semaphore_limit = claim.limit
  end
  local entry = find(claim.id_hash)
  if not entry then
    advance_queue()
    if not head() and redis.call('EXISTS', WAITERS) == 0 then next_waiter_scan = now + WAITER_TTL end
    entry = {id_hash = claim.id_hash, state = PASSED, token = 0, expires_at = 0, since = now, shared = claim.shared,
      delay = claim.delay, slot = -1, ticket = 0, heartbeat_expires_at = 0, holder = claim.holder, min_hold = claim.min_hold}
    if not head() and can_admit(claim.shared) then
      make_holder(entry, RESERVED, now)  -- and claimed at once, below
    elseif not claim.queue then
      return nil, busy()
    else
      last_ticket = last_ticket + 1
      entry.ticket = claim.ticket or last_ticket
    end
  end
  -- Clients' clocks may differ: a client whose clock is slow could never undo what it gets, if it inherited a number.
  if entry.client ~= claim.client and entry.state ~= HELD then entry.number = nil end
  entry.heartbeat_expires_at, entry.client = now + WAITER_TTL, claim.client
  if claim.number then entry.number = math.max(entry.number or 0, claim.number) end
  if entry.state == PASSED then  -- new, or passed over
    entry.state = WAITING
    enqueue(entry)
  elseif entry.state == WAITING and (not head() or head().ticket > entry.ticket) then
    enqueue(entry)  -- again: an eviction, or a script that was refused a command half-way, took it out of the queue
  end
  if entry.state == WAITING then
    entry.expires_at = 0
    write_waiter(entry)
    advance_queue(entry)
  end
  if entry.state == WAITING then return nil, busy(entry) end
  if entry.state == RESERVED then  -- claimed: its ttl starts at this request
    entry.state, entry.since, entry.expires_at = HELD, now, now
    if claim.proposal then  -- a Redlock node decides on the token only now: see quorum.py
      entry.token = math.max(tonumber(redis.call('GET', COUNTER)) + 1, now, claim.proposal)
      redis.call('SET', COUNTER, format_integer(entry.token))
    end
  end
  entry.delay, entry.min_hold = claim.delay, claim.min_hold
  local life = extend(entry, claim.ttl)
  if entry.shared ~= 0 or semaphore_limit > 0 or not head_knows(entry.expires_at) then advance_queue() end
  save()
  return entry, life
end
