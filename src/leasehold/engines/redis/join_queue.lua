-- The usual way into the queue, without lock_state.lua: one claim occupies the lock alone, and the head of the queue, if
-- there is one, knows when to re-check. The same steps as `attempt_claim` and `save`. If a client is unreachable, a
-- heartbeat is overdue, it is time to scan the waiters or the claim is queued already, the script continues with
-- lock_state, and nothing is changed yet.
local held = lock_state and lock_state[6]
if held and #lock_state == 6 and lock_state[1] == 0 and ARGV[5] == '0' and ARGV[4] == '1'
  and held[1] ~= id_hash and held[6] == 0 and held[3] > now and now < lock_state[3] then
  local recheck_at = held[5] == RESERVED and math.min(held[3], now + RESERVATION_PROBE) or held[3]
  local head = redis.call('ZRANGE', QUEUE, '0', '0')[1]
  local raw_first = head and redis.call('HGET', WAITERS, head)
  local first = raw_first and cmsgpack.unpack(raw_first)
  local usual
  if head then
    usual = first and first[10] > now and lock_state[4] == head and lock_state[5] <= recheck_at
  else
    usual = redis.call('EXISTS', WAITERS) == 0
  end
  if usual then
    local channel = CHANNEL .. client
    local subscribers = redis.call('PUBSUB', NUMSUB, channel, first and CHANNEL .. first[11] or channel,
      held[5] == RESERVED and CHANNEL .. held[11] or channel)
    local ticket = lock_state[2] + 1
    if (not first or subscribers[4] > 0) and (held[5] ~= RESERVED or subscribers[6] > 0)
      and not redis.call('HGET', WAITERS, id_hash) then
      local rechecks_itself = head and subscribers[2] > 0  -- when a reservation made from now on would be probed
      redis.call('HSET', WAITERS, id_hash, cmsgpack.pack({id_hash, 0, rechecks_itself and now + RESERVATION_PROBE or 0, now,
        WAITING, shared, delay, -1, ticket, now + WAITER_TTL, client, holder}))
      redis.call('ZADD', QUEUE, string.format('%d', ticket), id_hash)
      local position = 0
      if head then
        position = redis.call('ZCOUNT', QUEUE, '-inf', '+inf') - 1
      else  -- its keys are new, and this claim is the head: the reply tells it when to re-check
        local queue_expiry = string.format('%d', (now + QUEUE_TTL) / 1000 + 2)
        redis.call('PEXPIREAT', QUEUE, queue_expiry)
        redis.call('PEXPIREAT', WAITERS, queue_expiry)
        lock_state[3], lock_state[4], lock_state[5] = now + WAITER_TTL, id_hash, recheck_at
      end
      lock_state[2] = ticket
      local keep_until = math.max(held[3] + held[7], now + QUEUE_TTL)
      redis.call('SET', NAME, cmsgpack.pack(lock_state), 'PXAT', string.format('%d', keep_until / 1000 + 2))
      return {0, (head and held[3] or recheck_at) - now, position, held[2], held[12],
        rechecks_itself and 2 or subscribers[2] > 0 and 1 or 0}
    end
  end
end
