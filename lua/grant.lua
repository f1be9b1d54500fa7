-- grant.lua: remember what upstream says: what it grants, where that is less than the callers believe, and what it counted.
--
-- Guarantee: all that was remembered before is replaced, in one step; the same text again changes nothing. A caller that
-- passes another text with its next call of charge.lua is answered GRANTED. The rule is L28 in docs/ledger-rules.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua; only the state is written)
-- ARGV  1 granted        BUCKET=UNITS:SINCE_MS:UNTIL_MS, sorted, with `;` between; empty = nothing is remembered
--       2 retention_ms   the state lives at least as long from now on
--       3 compared       optional: for people, BUCKET=UPSTREAM:OURS:UNKNOWN:DRIFT:SINCE_MS:THROUGH_MS:AT_MS, with `;` between, in
--                        place of what was there; nothing is decided by it
-- Reply the text

local state, granted, retention_ms, compared = KEYS[2], ARGV[1], tonumber(ARGV[2]), ARGV[3]
local MAX_COMPARED_BYTES = 20000

-- @include parts/format.lua

local left = granted and string.gsub(granted .. ';', '[%w._:-]+=%d+:%d+:%d+;', '')
if not (retention_ms and retention_ms >= 1 and (left == '' or granted == '')) then
  return redis.error_reply('ERR grant.lua: granted is BUCKET=UNITS:SINCE_MS:UNTIL_MS;..., and retention_ms a number')
end
if compared and (#compared > MAX_COMPARED_BYTES or string.gsub(compared .. ';', '[%w._:-]*=?[%d:]*;', '') ~= '') then
  return redis.error_reply('ERR grant.lua: compared is BUCKET=UPSTREAM:OURS:UNKNOWN:DRIFT:SINCE_MS:THROUGH_MS:AT_MS;...')
end
local known = redis.call('HMGET', state, 'format', 'granted', 'epoch')
local unknown_format = other_format(known[1], known[3])
if unknown_format then return unknown_format end
if granted == '' and not known[2] and not compared then return granted end
local short = redis.call('PTTL', state) < retention_ms
-- Tried before anything is written, where it does no harm: Redis takes nothing back when a script fails.
if short then redis.call('PEXPIRE', state, retention_ms) end
redis.call('HDEL', state, '')
if granted ~= '' then redis.call('HSET', state, 'format', FORMAT, 'granted', granted) end
if compared then redis.call('HSET', state, 'format', FORMAT, 'compared', compared) end
if granted == '' and known[2] then redis.call('HDEL', state, 'granted') end
if short then redis.call('PEXPIRE', state, retention_ms) end
return granted
