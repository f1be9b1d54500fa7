-- exhaust.lua: upstream said "no more": close one bucket for everybody until its reset.
--
-- Guarantee: a bucket that is closed already stays as it is, so a repeat never extends it.
--
-- KEYS  1 log   2 state   3 amended     (see charge.lua; only the state is written)
-- ARGV  1 now_ms    0 = the server's clock
--       2 bucket
--       3 record    "UNTIL_MS SINCE_MS" and a JSON text of who and what; UNTIL_MS decides, the rest is kept for people
--       4 keep_ms   the state lives at least as long from now on
-- Reply the record that stands

local state = KEYS[2]
local now_ms, field, record, keep_ms = tonumber(ARGV[1]), 'closed:' .. ARGV[2], ARGV[3], tonumber(ARGV[4])
if now_ms == 0 then
  local time = redis.call('TIME')
  now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end

if not (now_ms and keep_ms and keep_ms >= 1 and string.find(record, '^%d+ %d+ ')) then
  return redis.error_reply('ERR exhaust.lua: now_ms and keep_ms are numbers, and a record begins "UNTIL_MS SINCE_MS "')
end

local standing = redis.call('HGET', state, field)
if standing and tonumber(string.match(standing, '^%d+')) > now_ms then return standing end
local short = redis.call('PTTL', state) < keep_ms
-- Tried before anything is written, where it does no harm: Redis takes nothing back when a script fails.
if short then redis.call('PEXPIRE', state, keep_ms) end
redis.call('HSET', state, field, record)
if short then redis.call('PEXPIRE', state, keep_ms) end
return record
