-- repay.lua: append what a machine spent on its local allowance while it could not reach this server.
--
-- Guarantee: each charge is appended once, however often it is sent: the last number repaid is kept for each machine.
-- Nothing is compared: it was spent. It is dated now, so it counts a little too long, never too short.
--
-- KEYS  1 log   2 state   3 amended     (see charge.lua)
-- ARGV  1 now_ms    0 = the server's clock
--       2 machine   name of the machine's journal
--       3 keep_ms   as in charge.lua
--       then six for each charge, at most 100, their numbers rising: number, u, method, job, region, token
-- Reply how many were appended

local log, state, amended = KEYS[1], KEYS[2], KEYS[3]
local clock_ms, machine, keep_ms = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local FIRST_CHARGE, CHARGE_SIZE, MOST_CHARGES = 4, 6, 100

-- Looked through before anything is written: half of a journal could not be sent again.
if not (clock_ms and keep_ms and keep_ms >= 1) then
  return redis.error_reply('ERR repay.lua: now_ms and keep_ms (1 or more) are numbers')
end
if #ARGV >= FIRST_CHARGE + MOST_CHARGES * CHARGE_SIZE then
  return redis.error_reply('ERR repay.lua: more than ' .. MOST_CHARGES .. ' charges')
end
for at = FIRST_CHARGE, #ARGV, CHARGE_SIZE do
  local number, u = tonumber(ARGV[at]), ARGV[at + 1] or ''
  if not (number and ARGV[at + 5] and (string.find(u, '^%d+$') or string.find(u, '=%d+$'))) then
    return redis.error_reply('ERR repay.lua: a charge is six arguments: number, u, method, job, region, token')
  end
end

if clock_ms == 0 then
  local time = redis.call('TIME')
  clock_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end
local last = redis.call('HGET', state, 'last')
local log_is_lost = last and redis.call('EXISTS', log) == 0
if not last then
  local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)
  last = newest[1] and newest[1][1] or '0-0'
end
local last_ms, last_seq = string.match(last, '^(%d+)-(%d+)$')
last_ms, last_seq = tonumber(last_ms), tonumber(last_seq)
local lost_ms = last_ms

local repaid = tonumber(redis.call('HGET', state, 'repaid:' .. machine) or 0)
-- What may fail is tried where it does no harm: Redis takes nothing back when a script fails.
local kept_ms = string.format('%.0f', math.max(keep_ms, tonumber(redis.call('HGET', state, 'keep_ms') or 0)))
local function set_lifetimes()
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < tonumber(kept_ms) then redis.call('PEXPIRE', key, kept_ms) end
  end
end
redis.call('PEXPIRE', amended, string.format('%.0f', math.max(tonumber(kept_ms), redis.call('PTTL', amended))))
redis.call('HSET', state, 'keep_ms', kept_ms)
set_lifetimes()

local appended = 0
for at = FIRST_CHARGE, #ARGV, CHARGE_SIZE do
  local number = tonumber(ARGV[at])
  if number > repaid then
    if clock_ms > last_ms then last_ms, last_seq = clock_ms, 0 else last_seq = last_seq + 1 end
    redis.call('XADD', log, string.format('%.0f-%.0f', last_ms, last_seq),
      'u', ARGV[at + 1], 'm', ARGV[at + 2], 'j', ARGV[at + 3], 'g', ARGV[at + 4], 't', ARGV[at + 5])
    repaid = number
    appended = appended + 1
  end
end
if appended > 0 then
  redis.call('HSET', state, 'last', string.format('%.0f-%.0f', last_ms, last_seq),
    'repaid:' .. machine, string.format('%.0f', repaid))
  if log_is_lost then -- deleted or evicted: see cut_ms in charge.lua
    redis.call('HSET', state, 'cut_ms', string.format('%.0f', lost_ms))
    if type(redis.pcall('DEL', amended)) ~= 'table' then redis.call('HSET', state, 'corrected', '0') end
  end
  set_lifetimes()
end
return appended
