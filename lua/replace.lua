-- replace.lua: replace the fenced or sealed log by the log that build.lua made.
--
-- Guarantee: one atomic step, and only if the fence still stands, the log has no new entry, and the replacement is complete. Log
-- and corrections change together; facts, claims and places stay, kept views do not. If the user lacks a right, nothing changes.
--
-- KEYS  1 log  2 state  3 corrected, as in append.lua  4, 5 log and corrected of the replacement
-- ARGV  1 fence     the fence of the author, before or after renewals; or the seal
--       2 tip       the newest entry that the author has read; 0-0 = none
--       3 epoch     of the new log; '' = the fence or the seal stays
--       4 entries, 5 corrections: their numbers in the replacement
--       6 trimmed   the newest entry that moved to the past; '' = unchanged
-- Reply 1 if the log was replaced, else 0

local log, state, corrected, built_log, built_corrected = unpack(KEYS)
local call = redis.call
local fence, tip, epoch, entries, corrections = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local trimmed = ARGV[6]

-- @include parts/clock.lua
-- @include parts/log_lifetime.lua
-- @include parts/log_rights.lua

local newest = call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
local stands = call('HGET', state, 'epoch') or ''
local token = string.match(fence, '^(~.*):%d*$')
local is_ours = token ~= nil and string.match(stands, '^(~.*):%d*$') == token -- perhaps renewed by its owner
if not (is_ours or (fence == stands and string.sub(fence, 1, 1) == '!')) or (newest and newest[1] or '0-0') ~= tip
  or call('XLEN', built_log) ~= entries or call('HLEN', built_corrected) ~= corrections
then
  call('DEL', built_log, built_corrected)
  return 0
end
try_rights()
call('HSET', state, 'epoch', stands) -- unchanged: this only tries the right
if entries > 0 then call('RENAME', built_log, log) else call('DEL', log) end
if corrections > 0 then call('RENAME', built_corrected, corrected) else call('DEL', corrected) end
for _, name in ipairs(call('HKEYS', state)) do
  if string.sub(name, 1, 5) == 'view:' then call('HDEL', state, name) end
end
local holds = (entries > 0 and 1 or 0) + (corrections > 0 and 1 or 0)
call('HSET', state, 'epoch', epoch ~= '' and epoch or stands, 'holds', holds)
if trimmed ~= '' then call('HSET', state, 'trimmed', trimmed) end
live_on()
return 1
