-- reopen.lua: lift an exhaustion, because somebody knows better than upstream's last word.
--
-- Guarantee: the bucket is open for everybody from now on. What upstream had said is kept for people, with the reason, until
-- the bucket is closed again. The rule is L20 in docs/ledger-rules.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua; only the state is written)
-- ARGV  1 now_ms    0 = the server's clock
--       2 bucket
--       3 because   a JSON text without line ends
-- Reply 1, or nil where the bucket is not closed

local state = KEYS[2]
local now_ms, bucket, because = tonumber(ARGV[1]), ARGV[2], ARGV[3]

-- @include parts/int.lua
-- @include parts/clock.lua
-- @include parts/format.lua

if not now_ms or string.find(because, '\n', 1, true) then
  return redis.error_reply('ERR reopen.lua: now_ms is a number, and because is one line')
end
now_ms = clock(now_ms)

local known = redis.call('HMGET', state, 'closed:' .. bucket, 'format', 'epoch')
local closed, unknown_format = known[1], other_format(known[2], known[3])
if unknown_format then return unknown_format end
if not closed then return nil end
redis.call('HDEL', state, '') -- L22. Tried where it does no harm
redis.call('HSET', state, 'reopened:' .. bucket, int(now_ms) .. ' ' .. because .. '\n' .. closed)
redis.call('HDEL', state, 'closed:' .. bucket)
return 1
