-- fence.lua: stop all appends to a project's log, for a moment (a fence) or for ever (a seal).
--
-- Guarantee: one atomic step. If several callers ask at once, one gets the fence. It ends after the lease, by the server's clock;
-- appends stay stopped until the fence is replaced. A seal replaces the fence of its author, and nothing replaces a seal.
--
-- KEYS  1 log  2 state  3 corrected, as in append.lua
-- ARGV  1 clock_ms  0 = the server's clock; another value is for tests and simulation
--       2 epoch     that the author has read; for a seal, its fence
--       3 token     of the author; for a seal, ''
--       4 lease_ms  how long the fence holds; for a seal, how long it is kept
--       5 url       for a seal: where the log has moved; '' = a fence
-- Reply {done, epoch}: 1 if the fence or seal stands, and the epoch now

local log, state, corrected = KEYS[1], KEYS[2], KEYS[3]
local epoch, token, lease_ms, url = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local LEASE_MS = 2000 -- a fence that ends later than this from now was set by a wrong clock

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
redis.call('PEXPIRE', state .. ':none', '1') -- fails before any write if the user lacks this right
redis.call('HSET', state, 'epoch', becomes)
redis.call('PEXPIRE', state, int(lease_ms))
return { 1, becomes }
