-- repay.lua: append what a machine spent on its local allowance while it could not reach this server.
--
-- Guarantee: each charge is appended once, however often it is sent: the last number repaid is kept for each machine.
-- Nothing is compared: it was spent. It is dated now, so it counts a little too long, never too short. The rule is L19 in
-- docs/ledger-rules.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua)
-- ARGV  1 now_ms         0 = the server's clock
--       2 caller_ms      the caller's clock; 0 = none
--       3 machine        name of the machine's journal
--       4 retention_ms   as in charge.lua
--       then six for each charge, at most 100, their numbers rising: number, u, method, job, region, idempotency_key
-- Reply how many were appended; CLOCK where the clocks disagree (L11), and nothing was

local log, state, corrections = KEYS[1], KEYS[2], KEYS[3]
local clock_ms, caller_ms, machine, retention_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local FIRST_CHARGE, CHARGE_SIZE, MAX_CHARGES = 5, 6, 100
local HISTORY_MS = 3024000000 -- 35 days (L29)

-- @include parts/int.lua
-- @include parts/clock.lua
-- @include parts/clocks_agree.lua
-- @include parts/ids.lua
-- @include parts/format.lua
-- @include parts/live_on.lua

-- Looked through before anything is written: half of a journal could not be sent again.
if not (clock_ms and caller_ms and retention_ms and retention_ms >= 1) then
  return redis.error_reply('ERR repay.lua: now_ms, caller_ms and retention_ms (1 or more) are numbers')
end
if #ARGV >= FIRST_CHARGE + MAX_CHARGES * CHARGE_SIZE then
  return redis.error_reply('ERR repay.lua: more than ' .. MAX_CHARGES .. ' charges')
end
for at = FIRST_CHARGE, #ARGV, CHARGE_SIZE do
  local number, u = tonumber(ARGV[at]), ARGV[at + 1] or ''
  if not (number and ARGV[at + 5] and (string.find(u, '^%d+$') or string.find(u, '=%d+$'))) then
    return redis.error_reply(
      'ERR repay.lua: a charge is six arguments: number, u, method, job, region, idempotency key')
  end
end
clock_ms = clock(clock_ms)
if not clocks_agree(clock_ms, caller_ms) then return 'CLOCK' end

local known = redis.call('HMGET', state, 'last', 'repaid:' .. machine, 'retention_ms', 'format', 'epoch')
local unknown_format = other_format(known[4], known[5])
if unknown_format then return unknown_format end
local last, repaid = known[1], tonumber(known[2] or 0)
local log_is_lost = last and redis.call('EXISTS', log) == 0
local kept_ms, has_corrections = 0, nil
if not last then -- as charge.lua makes it again
-- @include parts/from_other_keys.lua
  last, kept_ms, has_corrections = from_other_keys()
end
local last_ms, last_seq = split(last)
local lost_ms = last_ms

-- L22. What may fail is tried where it does no harm.
local stored_retention_ms = int(math.max(retention_ms, kept_ms, tonumber(known[3] or 0)))
local live_ms = math.max(tonumber(stored_retention_ms), HISTORY_MS) -- L12
redis.call('PEXPIRE', corrections, int(math.max(live_ms, redis.call('PTTL', corrections))))
redis.call('XADD', log .. ':none', 'NOMKSTREAM', '*', 'u', '0')
redis.call('HSET', state, 'format', FORMAT, 'retention_ms', stored_retention_ms)
live_on(live_ms)

local appended = 0
for at = FIRST_CHARGE, #ARGV, CHARGE_SIZE do
  local number = tonumber(ARGV[at])
  if number > repaid then
    if clock_ms > last_ms then last_ms, last_seq = clock_ms, 0 else last_seq = last_seq + 1 end -- L10
    redis.call('XADD', log, int(last_ms) .. '-' .. int(last_seq),
      'u', ARGV[at + 1], 'm', ARGV[at + 2], 'j', ARGV[at + 3], 'g', ARGV[at + 4], 'k', ARGV[at + 5])
    repaid = number
    appended = appended + 1
    if not known[5] and appended == 1 then redis.call('HSET', state, 'epoch', ARGV[at + 5]) end -- L18
  end
end
if appended > 0 then
  redis.call('HSET', state, 'last', int(last_ms) .. '-' .. int(last_seq), 'repaid:' .. machine, int(repaid),
    'repaid_at:' .. machine, int(clock_ms))
  if has_corrections then redis.call('HSET', state, 'has_corrections', '1') end
  if log_is_lost then -- L14
    redis.call('HSET', state, 'trimmed_through_ms', int(lost_ms))
    if type(redis.pcall('DEL', corrections)) ~= 'table' then redis.call('HSET', state, 'has_corrections', '0') end
  end
  live_on(live_ms)
end
return appended
