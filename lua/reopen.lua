-- reopen.lua: lift an exhaustion, because somebody knows better than upstream's last word.
--
-- Guarantee: the bucket is open for everybody from now on. What upstream had said is kept for people, with the reason, until
-- the bucket is closed again. The rule is L20 in ARCHITECTURE.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua; only the state is written)
-- ARGV  1 now_ms    0 = the server's clock
--       2 bucket
--       3 because   a JSON text without line ends
-- Reply 1, or nil where the bucket is not closed

local state = KEYS[2]
local now_ms, bucket, because = tonumber(ARGV[1]), ARGV[2], ARGV[3]

-- >>> int
-- A whole number as text: Lua would write 1e+15.
local function int(n) return string.format('%.0f', n) end
-- <<< int

-- >>> clock
-- The server's clock in ms, or the time that was given, for tests and simulation.
local function clock(given_ms)
  if given_ms ~= 0 then return given_ms end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
-- <<< clock

-- >>> format
-- An error where the state's field `format` (false: there is none) is not ours (L24), or where `epoch` (false: there is none)
-- says that the ledger has moved or is being filled (L27). Else nil, also for a new state.
local FORMAT = '5'
local function other_format(found, epoch)
  local peer = string.match(epoch or '', '^!(.*)')
  if found == FORMAT and peer then
    local way = string.match(peer, '^[<>]')
    local what = way == '<' and 'is being moved here from ' or way == '>' and 'is being moved to ' or 'has moved to '
    local since = way and ' and takes no charge until that is done' or ' and takes no charge here any more'
    return redis.error_reply('ERR the ledger ' .. what .. string.sub(peer, way and 2 or 1) .. since)
  end
  if found == FORMAT or (not found and redis.call('EXISTS', KEYS[2]) == 0) then return nil end
  return redis.error_reply('ERR the ledger has format ' .. (found or '0') .. ', and this script needs ' .. FORMAT
    .. ': use the scripts of its version, or delete its keys, and with them what was charged')
end
-- <<< format

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
