-- L23. Housekeeping, a bounded piece at a time. If it fails, the charge stands. `last_ms` is of before this charge. Returns the
-- server's maxmemory-policy, where that is to be told.
local function keep_house(clock_ms, now_ms, last_ms, retention_ms, trimmed_through_ms, unlogged_until_ms, has_corrections)
  local told
  redis.pcall('HSET', state, 'maintained_ms', int(clock_ms))
  pcall(function()
    if math.abs(clock_ms - number(redis.call('HGET', state, 'eviction_checked_ms'))) < CHECK_EVICTION_EVERY_MS then return end
    redis.call('HSET', state, 'eviction_checked_ms', int(clock_ms))
    local info = redis.pcall('INFO', 'memory')
    local policy = type(info) == 'string' and string.match(info, 'maxmemory_policy:(%S+)') or '?'
    if policy ~= 'noeviction' then told = policy end
  end)
  -- L13. The log is kept for the longest window that anybody ever named, and until the history has it (L29). What the newest
  -- charge before this one still needed stays until the next: a clock that stood ahead for one charge costs no history.
  local sure_ms = math.min(now_ms, last_ms)
  pcall(function()
    local through, rolled = int(math.max(0, sure_ms - retention_ms)) .. '-0', redis.call('HGET', state, 'rolled_up')
    if rolled then
      local forgotten = int(math.max(0, sure_ms - HISTORY_MS)) .. '-0'
      if before(rolled, forgotten) then rolled = forgotten end
      if before(rolled, through) then through = rolled end
    end
    local old = redis.call('XRANGE', log, '-', '(' .. through, 'COUNT', CHUNK)
    if #old == 0 then return end
    local ms, seq = split(old[#old][1])
    redis.call('XTRIM', log, 'MINID', int(ms) .. '-' .. int(seq + 1))
    redis.call('HSET', state, 'trimmed_through_ms', int(math.max(trimmed_through_ms, ms)))
    if #old == CHUNK then redis.call('HSET', state, 'maintained_ms', '0') end
    if not has_corrections then return end
    for _, entry in ipairs(old) do redis.call('HDEL', corrections, entry[1]) end
    if redis.call('EXISTS', corrections) == 0 then redis.call('HSET', state, 'has_corrections', '0') end
  end)
  -- From the state go: keys of retries whose first tries have long failed, unlogged usage that has expired, claims and places
  -- that have lapsed, the last numbers of machines that have repaid nothing for as long as the log is kept, and views that nobody has
  -- used for as long: their limits are configured no more.
  pcall(function()
    local from = redis.call('HGET', state, 'housekeeping_cursor') or '0'
    local piece = redis.call('HSCAN', state, string.match(from, '^%d+$') or '0', 'COUNT', CHUNK)
    for at = 1, #piece[2], 2 do
      local field, value, old = piece[2][at], piece[2][at + 1], false
      local kind = string.match(field, '^[%a_]+:?')
      if kind == 'view:' then
        local head_ms = tonumber(string.match(value, '^%d+ %d+%-%d+ (%d+)%-%d+ %d+$'))
        old = head_ms and head_ms <= now_ms - retention_ms
      elseif kind == 'retried:' then
        old = math.abs(clock_ms - (tonumber(value) or 0)) >= RETRIED_KEPT_MS
      elseif kind == 'unlogged:' or field == 'unlogged_until_ms' then
        old = unlogged_until_ms + RETENTION_SLACK_MS <= sure_ms
      elseif kind == 'repaid_at:' then
        old = (tonumber(value) or 0) <= clock_ms - retention_ms
        if old then redis.call('HDEL', state, (string.gsub(field, '^repaid_at:', 'repaid:'))) end
      elseif kind == 'claim:' or kind == 'place:' then
        old = (tonumber(string.match(value, '^(%d+) ')) or 0) <= clock_ms
      end
      if old then redis.call('HDEL', state, field) end
    end
    if piece[1] ~= from then redis.call('HSET', state, 'housekeeping_cursor', piece[1]) end
  end)
  return told
end
