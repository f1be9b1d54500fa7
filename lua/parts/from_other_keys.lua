-- L14. What a state that was evicted said, as far as the log and the corrections tell: the log's last id, how long the log is to
-- be kept, in ms, and whether there are corrections.
local function from_other_keys()
  local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  return newest and newest[1] or '0-0', math.max(0, redis.call('PTTL', log)), redis.call('EXISTS', corrections) == 1
end
