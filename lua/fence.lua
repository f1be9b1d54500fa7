-- fence.lua: keep everybody from appending to a project's log, for a moment (a fence) or for good (a seal).
--
-- Guarantee: one atomic step. Of several who ask at once, one has the fence. Its end is the server's clock and the lease; nobody
-- appends before the fence is replaced. A seal replaces the fence of its author, and nothing ever replaces a seal.
--
-- KEYS  1 log  2 state  3 corrected, as in append.lua
-- ARGV  1 clock_ms  0 = the server's clock; anything else is for tests and simulation
--       2 epoch     that the author has read; of a seal, its fence
--       3 token     of the author; of a seal, ''
--       4 lease_ms  how long the fence holds; of a seal, how long it is kept
--       5 url       of a seal: where the log has moved to; '' = a fence
-- Reply {done, epoch}: 1 if it was done, and the epoch that holds now

local log, state, corrected = KEYS[1], KEYS[2], KEYS[3]
local epoch, token, lease_ms, url = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local LEASE_MS = 2000 -- no fence ends later than this after now, unless its clock was wrong

-- @include parts/clock.lua
-- @include parts/log_fence.lua
-- @include parts/log_standing.lua
-- @include parts/log_lifetime.lua

local clock_ms = clock(tonumber(ARGV[1]))
local fields = redis.call('HMGET', state, 'epoch', 'holds', 'keep_ms')
local stored = standing(fields[1] or '', tonumber(fields[2] or 0) or 0)
local kind, becomes = string.sub(stored, 1, 1), nil
if url ~= '' then
  if not is_of(epoch, stored) then return { 0, stored } end
  becomes = '!' .. url
else
  local owner, end_text = string.match(stored, '^~(.*):(%d*)$')
  local end_ms = tonumber(end_text)
  local is_over = kind == '~' and not (end_ms and clock_ms < end_ms and end_ms <= clock_ms + LEASE_MS)
  if kind == '!' or not (is_over or owner == token or (kind ~= '~' and stored == epoch)) then return { 0, stored } end
  becomes = '~' .. token .. ':' .. int(clock_ms + lease_ms)
  lease_ms = lifetime_ms(tonumber(fields[3] or 0) or 0)
end
redis.call('PEXPIRE', state .. ':none', '1') -- without the right to do that nothing is written
redis.call('HSET', state, 'epoch', becomes)
redis.call('PEXPIRE', state, int(lease_ms))
return { 1, becomes }
