-- exhaust.lua: upstream said "no more": close one bucket for everybody until its reset.
--
-- Guarantee: a bucket that is closed already stays as it is, so a repeat never extends it. One that was reopened since what
-- upstream said (SINCE_MS) stays open: that was known when it was reopened.
--
-- KEYS  1 log   2 state   3 amended     (see charge.lua; only the state is written)
-- ARGV  1 now_ms    0 = the server's clock
--       2 bucket
--       3 record    "UNTIL_MS SINCE_MS" and a JSON text of who and what; UNTIL_MS decides, the rest is kept for people
--       4 keep_ms   the state lives at least as long from now on
-- Reply the record that stands, or, of a bucket that stays open, "REOPENED_MS BECAUSE", a line end and its record

local state = KEYS[2]
local now_ms, field, record, keep_ms = tonumber(ARGV[1]), 'closed:' .. ARGV[2], ARGV[3], tonumber(ARGV[4])
local reopened_field = 'reopened:' .. ARGV[2]
if now_ms == 0 then
  local time = redis.call('TIME')
  now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end

if not (now_ms and keep_ms and keep_ms >= 1 and string.find(record, '^%d+ %d+ ')) then
  return redis.error_reply('ERR exhaust.lua: now_ms and keep_ms are numbers, and a record begins "UNTIL_MS SINCE_MS "')
end

local standing = redis.call('HGET', state, field)
if standing and tonumber(string.match(standing, '^%d+')) > now_ms then return standing end
local reopened = redis.call('HGET', state, reopened_field)
if reopened then
  local reopened_ms, until_ms = string.match(reopened, '^(%d+) [^\n]*\n(%d+) ')
  local since_ms = tonumber(string.match(record, '^%d+ (%d+) '))
  reopened_ms = tonumber(reopened_ms) or 0
  if since_ms < reopened_ms and reopened_ms <= now_ms and tonumber(until_ms) > now_ms then return reopened end
end
local short = redis.call('PTTL', state) < keep_ms
-- Tried before anything is written, where it does no harm: Redis takes nothing back when a script fails.
if short then redis.call('PEXPIRE', state, keep_ms) end
redis.call('HSET', state, field, record)
if reopened then redis.call('HDEL', state, reopened_field) end
if short then redis.call('PEXPIRE', state, keep_ms) end
return record
