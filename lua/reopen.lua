-- reopen.lua: lift an exhaustion, because somebody knows better than upstream's last word.
--
-- Guarantee: the bucket is open for everybody from now on. What upstream had said is kept for people, with the reason, until
-- the bucket is closed again.
--
-- KEYS  1 log   2 state   3 amended     (see charge.lua; only the state is written)
-- ARGV  1 now_ms    0 = the server's clock
--       2 bucket
--       3 because   a JSON text without line ends
-- Reply 1, or nil where the bucket is not closed

local state = KEYS[2]
local now_ms, bucket, because = tonumber(ARGV[1]), ARGV[2], ARGV[3]
if now_ms == 0 then
  local time = redis.call('TIME')
  now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end

if not now_ms or string.find(because, '\n', 1, true) then
  return redis.error_reply('ERR reopen.lua: now_ms is a number, and because is one line')
end

local closed = redis.call('HGET', state, 'closed:' .. bucket)
if not closed then return nil end
redis.call('HSET', state, 'reopened:' .. bucket, string.format('%.0f', now_ms) .. ' ' .. because .. '\n' .. closed)
redis.call('HDEL', state, 'closed:' .. bucket)
return 1
