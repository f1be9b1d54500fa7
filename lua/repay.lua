-- repay.lua: append what a machine spent on its local allowance while it could not reach this server.
--
-- Guarantee: each charge is appended once, however often it is sent: the last number repaid is kept for each machine.
-- Nothing is compared: it was spent. It is dated now, so it counts a little too long, never too short. The rule is L19 in
-- ARCHITECTURE.md.
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

-- >>> int
-- A whole number as text: Lua would write 1e+15.
local function int(n) return string.format('%.0f', n) end
-- <<< int

-- >>> clock
-- The server's clock in ms, or the time that was given, for tests and simulation.
local function clock(given_ms)
  if given_ms ~= 0 then return given_ms end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
-- <<< clock

-- >>> clock bounds
-- L11. Neither clock is trusted where a caller's is further ahead of the server's, or further behind it, than these.
local CLOCK_SLACK_MS, CLOCK_BEHIND_MS = 5000, 3600000
-- <<< clock bounds

-- >>> clocks agree
local function clocks_agree(clock_ms, caller_ms)
  return caller_ms == 0 or (caller_ms <= clock_ms + CLOCK_SLACK_MS and caller_ms >= clock_ms - CLOCK_BEHIND_MS)
end
-- <<< clocks agree

-- >>> ids
-- Ids are "ms-seq", compared by both numbers.
local function split(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local function before(a, b)
  local a_ms, a_seq = split(a)
  local b_ms, b_seq = split(b)
  return a_ms < b_ms or (a_ms == b_ms and a_seq < b_seq)
end
-- <<< ids

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
if not last then
  local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)
  last = newest[1] and newest[1][1] or '0-0'
end
local last_ms, last_seq = split(last)
local lost_ms = last_ms

-- L22. What may fail is tried where it does no harm.
local stored_retention_ms = int(math.max(retention_ms, tonumber(known[3] or 0)))
local live_ms = math.max(tonumber(stored_retention_ms), HISTORY_MS) -- L12
local function set_lifetimes()
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < live_ms then redis.call('PEXPIRE', key, int(live_ms)) end
  end
end
redis.call('PEXPIRE', corrections, int(math.max(live_ms, redis.call('PTTL', corrections))))
redis.call('XADD', log .. ':none', 'NOMKSTREAM', '*', 'u', '0')
redis.call('HSET', state, 'format', FORMAT, 'retention_ms', stored_retention_ms)
set_lifetimes()

local appended = 0
for at = FIRST_CHARGE, #ARGV, CHARGE_SIZE do
  local number = tonumber(ARGV[at])
  if number > repaid then
    if clock_ms > last_ms then last_ms, last_seq = clock_ms, 0 else last_seq = last_seq + 1 end -- L10
    redis.call('XADD', log, int(last_ms) .. '-' .. int(last_seq),
      'u', ARGV[at + 1], 'm', ARGV[at + 2], 'j', ARGV[at + 3], 'g', ARGV[at + 4], 'k', ARGV[at + 5])
    repaid = number
    appended = appended + 1
  end
end
if appended > 0 then
  redis.call('HSET', state, 'last', int(last_ms) .. '-' .. int(last_seq), 'repaid:' .. machine, int(repaid),
    'repaid_at:' .. machine, int(clock_ms))
  if log_is_lost then -- L14
    redis.call('HSET', state, 'trimmed_through_ms', int(lost_ms))
    if type(redis.pcall('DEL', corrections)) ~= 'table' then redis.call('HSET', state, 'has_corrections', '0') end
  end
  set_lifetimes()
end
return appended
