-- read.lua: a piece of the log, with corrections applied (L1, L15 in docs/ledger-rules.md). Changes nothing.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua)
-- ARGV  1 from    first id; "(ID" for exclusive
--       2 to      last id or millisecond, inclusive
--       3 count   at most this many entries, 1 to 250; another number is an error
-- Reply { { id, u, m, j, g, k, corrected units or "" }, ... } in time order

local log, state, corrections = KEYS[1], KEYS[2], KEYS[3]
local from, to, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
if not (count and count >= 1 and count <= 250) then
  return redis.error_reply('ERR read.lua: count is 1 to 250')
end

-- @include parts/format.lua

local unknown_format = other_format(redis.call('HGET', state, 'format'))
if unknown_format then return unknown_format end

local any_corrections = redis.call('EXISTS', corrections) == 1
local reply = {}
for i, entry in ipairs(redis.call('XRANGE', log, from, to, 'COUNT', count)) do
  local f = entry[2]
  local corrected = any_corrections and redis.call('HGET', corrections, entry[1])
  reply[i] = { entry[1], f[2], f[4], f[6], f[8], f[10], corrected or '' }
end
return reply
