-- The past is kept for 35 days, plus the last entry before them as a sign that older entries existed, and has at most MAX_PAST
-- entries. If all are older, all stay: the clock may be wrong.
local MAX_PAST = '500000'
local function keep_past(clock_ms)
  local until_id = int(math.max(1, clock_ms - PAST_MS)) .. '-0'
  local last = redis.call('XREVRANGE', past, '(' .. until_id, '-', 'COUNT', 1)[1]
  if last and #redis.call('XRANGE', past, until_id, '+', 'COUNT', 1) > 0 then redis.call('XTRIM', past, 'MINID', '~', last[1]) end
  redis.call('XTRIM', past, 'MAXLEN', '~', MAX_PAST)
  redis.call('PEXPIRE', past, int(PAST_MS))
end
