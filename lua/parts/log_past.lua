-- The past is kept for 35 days, plus the last entry before them as a sign that older entries existed, and has at most MAX_PAST
-- entries. If all are older, all stay: the clock may be wrong.
local MAX_PAST = '500000'
local function keep_past(clock_ms)
  local until_id = int(math.max(1, clock_ms - PAST_MS)) .. '-0'
  local before_id = '(' .. until_id
  local has_old = redis.call('XRANGE', past, '-', before_id, 'COUNT', 1)[1] -- without one, XREVRANGE reads the whole past
  if has_old and redis.call('XRANGE', past, until_id, '+', 'COUNT', 1)[1] then
    redis.call('XTRIM', past, 'MINID', '~', redis.call('XREVRANGE', past, before_id, '-', 'COUNT', 1)[1][1])
  end
  redis.call('XTRIM', past, 'MAXLEN', '~', MAX_PAST)
  redis.call('PEXPIRE', past, int(PAST_MS))
end
