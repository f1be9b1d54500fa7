-- fence.lua: close a ledger to everybody while its content moves, and open the one that it moved to.
--
-- Guarantee: one atomic step, and only from the standing that the caller names; a repeat changes nothing. A fenced ledger
-- refuses every decision and every other write, from any language; only its log can be read. The rule is L27 in
-- docs/ledger-rules.md; `quota ledger move` goes through these standings:
--
--       OLD  open -> fenced -> sealed      NEW  empty, or sealed by an earlier move -> filling -> open
--
-- NEW opens only after OLD is sealed, and OLD can be opened again only before that: then NEW is cleared and sealed.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua)
-- ARGV  1 now_ms     0 = the server's clock
--       2 from       the standing that the ledger must have, "ROLE MOVE". Another: nothing changes. Empty: only look
--       3 role       what it becomes: fenced, sealed, filling, open
--       4 move       the name of the move, unique, without spaces
--       5 peer       for fenced and sealed: where it moves to; for filling: where from. A URL without secrets and spaces
--       6 epoch      for filling: the epoch with which it will open; for fenced: where it has none yet
--       7 charges    for sealed, and to open what was filled: how many the log must hold
-- Reply { role, move, epoch, peer, filled, charges, last } as they are afterwards. `role` is open, too, for a ledger that no
--       move has touched; `epoch` is that without the fence; `filled` the id up to which it was filled (see fill.lua)

local log, state, corrections = KEYS[1], KEYS[2], KEYS[3]
local now_ms, from, role, move, peer, epoch, charges = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local FENCE_KEPT_MS = 34560000000 -- 400 days: a machine may ask at the old address for that long
local HISTORY_MS = 3024000000 -- 35 days (L29)
local RETENTION_SLACK_MS = 90000000

-- @include parts/int.lua
-- @include parts/clock.lua
-- @include parts/format.lua
-- @include parts/live_on.lua

local function standing()
  local known = redis.call('HMGET', state, 'epoch', 'fenced_epoch', 'fence', 'move', 'filled', 'last')
  local held = redis.call('XLEN', log)
  local epoch, last = known[1] or '', known[6]
  local role, peer = string.match(epoch, '^!') and known[3] or 'open', string.match(epoch, '^![<>]?(.*)') or ''
  if role == 'open' and held == 0 and redis.call('EXISTS', state, corrections) == 0 then role = 'empty' end
  if role ~= 'open' then epoch = known[2] or '' end
  if not last then
    local newest = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
    last = newest and newest[1] or '0-0'
  end
  return { role, known[4] or '', epoch, peer, known[5] or '', int(held), last }
end

if not (now_ms and ARGV[7]) then return redis.error_reply('ERR fence.lua: seven arguments are needed') end
local unknown_format = other_format(redis.call('HGET', state, 'format'))
if unknown_format then return unknown_format end
local is = standing()
if from == '' or from ~= is[1] .. ' ' .. is[2] then return is end
if (role == 'sealed' or (role == 'open' and is[1] == 'filling')) and charges ~= is[6] then return is end

-- L22. No key is left without a lifetime; what may fail is tried where it does no harm.
local known = redis.call('HMGET', state, 'retention_ms', 'unlogged_until_ms')
local live_ms = math.max(HISTORY_MS, tonumber(known[1] or 0),
  tonumber(known[2] or 0) + RETENTION_SLACK_MS - clock(now_ms))
local state_live_ms = (role == 'open' or role == 'filling') and live_ms or math.max(live_ms, FENCE_KEPT_MS)
local function keep_alive()
  redis.call('PEXPIRE', state, int(state_live_ms))
  live_on(live_ms)
end
keep_alive()
redis.call('HDEL', state, '')

if role == 'fenced' then
  local kept = is[3] ~= '' and is[3] or epoch
  redis.call('HSET', state, 'format', FORMAT, 'epoch', '!>' .. peer, 'fenced_epoch', kept, 'fence', role, 'move', move)
elseif role == 'sealed' then
  redis.call('HSET', state, 'epoch', '!' .. peer, 'fence', role)
  redis.call('HDEL', state, 'filled')
elseif role == 'filling' then
  redis.call('HSET', state, 'format', FORMAT, 'epoch', '!<' .. peer, 'fenced_epoch', epoch, 'fence', role, 'move', move)
  redis.call('HDEL', state, 'filled')
elseif role == 'open' then
  local any_corrections = redis.call('EXISTS', corrections) == 1 and '1' or '0'
  redis.call('HSET', state, 'epoch', is[3], 'move', move, 'has_corrections', any_corrections)
  redis.call('HDEL', state, 'fence', 'fenced_epoch', 'filled')
else
  return redis.error_reply('ERR fence.lua: a ledger cannot become ' .. role)
end
keep_alive()
return standing()
