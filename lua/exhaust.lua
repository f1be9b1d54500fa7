-- exhaust.lua: upstream said "no more": close one bucket for everybody until its reset.
--
-- Guarantee: a bucket that is closed already stays as it is, so a repeat never extends it. One that was reopened since what
-- upstream said (SINCE_MS) stays open: that was known when it was reopened. The rule is L20 in docs/ledger-rules.md.
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

-- @include parts/clock.lua
-- @include parts/format.lua

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
