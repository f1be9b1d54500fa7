-- exhaust.lua: upstream said "no more": close one bucket for everybody until its reset.
--
-- Guarantee: a bucket that is closed already stays as it is, so a repeat never extends it. One that was reopened since what
-- upstream said (SINCE_MS) stays open: that was known when it was reopened. The rule is L20 in ARCHITECTURE.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua; only the state is written)
-- ARGV  1 now_ms         0 = the server's clock
--       2 bucket
--       3 record         "UNTIL_MS SINCE_MS" and a JSON text of who and what; UNTIL_MS decides, the rest is kept for people
--       4 retention_ms   the state lives at least as long from now on
-- Reply the record that stands, or, of a bucket that stays open, "REOPENED_MS BECAUSE", a line end and its record

local state = KEYS[2]
local now_ms, field, record, retention_ms = tonumber(ARGV[1]), 'closed:' .. ARGV[2], ARGV[3], tonumber(ARGV[4])
local reopened_field = 'reopened:' .. ARGV[2]

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

if not (now_ms and retention_ms and retention_ms >= 1 and string.find(record, '^%d+ %d+ ')) then
  return redis.error_reply('ERR exhaust.lua: now_ms and retention_ms are numbers, and a record begins "UNTIL_MS SINCE_MS "')
end
now_ms = clock(now_ms)

local known = redis.call('HMGET', state, field, reopened_field, 'format', 'epoch')
local standing, reopened, unknown_format = known[1], known[2], other_format(known[3], known[4])
if unknown_format then return unknown_format end
if standing and tonumber(string.match(standing, '^%d+')) > now_ms then return standing end
if reopened then
  local reopened_ms, until_ms = string.match(reopened, '^(%d+) [^\n]*\n(%d+) ')
  local since_ms = tonumber(string.match(record, '^%d+ (%d+) '))
  reopened_ms = tonumber(reopened_ms) or 0
  if since_ms < reopened_ms and reopened_ms <= now_ms and tonumber(until_ms) > now_ms then return reopened end
end
local short = redis.call('PTTL', state) < retention_ms
-- Tried before anything is written, where it does no harm: Redis takes nothing back when a script fails.
if short then redis.call('PEXPIRE', state, retention_ms) end
redis.call('HDEL', state, '')
redis.call('HSET', state, 'format', FORMAT, field, record)
if reopened then redis.call('HDEL', state, reopened_field) end
if short then redis.call('PEXPIRE', state, retention_ms) end
return record
