-- claim.lua: each region of a job belongs to one store at a time, and each tick of a schedule is run once (L25).
--
-- Guarantee: of any number of runs, each region goes to the runs of one store, and never to two runs at once. A region is
-- given to a run if it is free, has lapsed, or belongs to the run's own store; there the store's last run must have ended,
-- or be dead. Claiming again renews, and tells a run what it has lost. The ledger's clock alone counts.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua; only the field claim:NAME of the state is written)
-- ARGV  1 now_ms      0 = the server's clock
--       2 mode        claim; take = also what belongs to other stores; done, stopped, failed = the run has ended.
--                     After `stopped` its tick may be run again; after `failed` its regions are free at once
--       3 name        of the job: whatever claims under it shares its regions
--       4 owner       the store
--       5 run         its id, unique to this run
--       6 machine     names a lock that the run holds: of two runs with the same one, the earlier is dead
--       7 host        where it runs, for people
--       8 hold_ms     how long the regions stay with the store after the run was last heard of: 1 to 49 h
--       9 lease_ms    a run that is silent for longer counts as dead: 1 to 49 h
--      10 tick        the tick of a schedule that this run is; empty = none
--      11 tick_ms     how long a tick that was run is remembered: 1 to 8 days. Of more than 1,000, those that end first go
--      then the regions, at most 1,000 (none when a run has ended: all of its own are meant)
--
-- Reply { now_ms, tick, holders... }
--       tick        empty, or why nothing was claimed: done = it was run already, running = another run is running it
--       holders     for each region, in their order: empty where the run has it now, else whose it is, a JSON text with
--                   owner, host, seen_ms, until_ms, running
--
-- The field claim:NAME is "UNTIL_MS JSON". UNTIL_MS is when the last of it lapses. JSON has `runs`, one for each hold of a
-- store, and `ticks`, those that were run and when that is forgotten.

local state = KEYS[2]
local now_ms, mode, name, owner, run, machine, host = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local hold_ms, lease_ms, tick, tick_ms = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10], tonumber(ARGV[11])
local FIRST_REGION = 12
local MAX_HOLD_MS = 176400000 -- 49 h
local MAX_TICK_MS = 691200000 -- 8 days
local MAX_TICKS = 1000
local MAX_REGIONS = 1000

-- @include parts/int.lua
-- @include parts/clock.lua
-- @include parts/format.lua

local ended = mode == 'done' or mode == 'stopped' or mode == 'failed'
local function among(n, most) return n and n >= 1 and n <= most end
if not (ended or mode == 'claim' or mode == 'take') or #ARGV < FIRST_REGION - 1 then
  return redis.error_reply('ERR claim.lua: 11 arguments are needed, and a mode that is claim, take, done, stopped or failed')
elseif not (now_ms and now_ms >= 0 and among(hold_ms, MAX_HOLD_MS) and among(lease_ms, MAX_HOLD_MS) and among(tick_ms, MAX_TICK_MS)) then
  return redis.error_reply('ERR claim.lua: now_ms, hold_ms and lease_ms (1 to 49 h) and tick_ms (1 to 8 days) are numbers')
elseif name == '' or owner == '' or run == '' then
  return redis.error_reply('ERR claim.lua: a claim needs a name, an owner and a run')
elseif #ARGV - FIRST_REGION + 1 > MAX_REGIONS then
  return redis.error_reply('ERR claim.lua: more than ' .. MAX_REGIONS .. ' regions')
end
now_ms = clock(now_ms)

local known = redis.call('HMGET', state, 'claim:' .. name, 'format', 'epoch')
local unknown_format = other_format(known[2], known[3])
if unknown_format then return unknown_format end

-- The record without what has lapsed. What is dated ahead of now, by a clock that was wrong, is dated now; what is not ours
-- is written anew.
local runs, ticks, dated = {}, {}, false
local read = pcall(function()
  local record = cjson.decode(string.match(known[1], '^%d+ (.*)$'))
  for _, one in ipairs(record.runs) do
    local ahead_ms = math.max(0, one.seen_ms - now_ms)
    dated = dated or ahead_ms > 0
    one.seen_ms, one.alive_until_ms = one.seen_ms - ahead_ms, one.alive_until_ms - ahead_ms
    one.until_ms = math.min(one.until_ms - ahead_ms, now_ms + MAX_HOLD_MS)
    local names = one.owner .. one.run .. one.machine .. one.host .. one.tick .. table.concat(one.regions)
    if names and one.until_ms > now_ms then runs[#runs + 1] = one end
  end
  for one, until_ms in pairs(record.ticks) do
    local at_most_ms = now_ms + MAX_TICK_MS
    dated = dated or until_ms > at_most_ms
    if until_ms > now_ms then ticks[one] = math.min(until_ms, at_most_ms) end
  end
end)
if not read then runs, ticks = {}, {} end

-- Whether this is another run than ours, and may be alive.
local function blocks(one)
  return one.run ~= '' and one.run ~= run and one.machine ~= machine and one.alive_until_ms > now_ms
end

local reply = { int(now_ms), '' }
local left = {}
if ended then
  for _, one in ipairs(runs) do
    if one.owner ~= owner or one.run ~= run then
      left[#left + 1] = one
    elseif mode ~= 'failed' and #one.regions > 0 then
      one.run, one.tick, one.seen_ms, one.until_ms = '', '', now_ms, now_ms + hold_ms
      left[#left + 1] = one
    end
  end
  if tick ~= '' and mode ~= 'stopped' then
    ticks[tick] = now_ms + tick_ms
    local by_end = {}
    for one in pairs(ticks) do by_end[#by_end + 1] = one end
    if #by_end > MAX_TICKS then
      table.sort(by_end, function(a, b) return ticks[a] < ticks[b] or (ticks[a] == ticks[b] and a < b) end)
      for n = 1, #by_end - MAX_TICKS do ticks[by_end[n]] = nil end
    end
  end
else
  if ticks[tick] then reply[2] = 'done' end
  for _, one in ipairs(runs) do
    if tick ~= '' and reply[2] == '' and one.tick == tick and blocks(one) then reply[2] = 'running' end
  end
  local holders = {}
  for _, one in ipairs(runs) do
    local own = one.owner == owner
    if not (mode == 'take' or (own and not blocks(one))) then
      local holder = '{"owner":' .. cjson.encode(one.owner) .. ',"host":' .. cjson.encode(one.host) .. ',"seen_ms":'
        .. int(one.seen_ms) .. ',"until_ms":' .. int(own and one.alive_until_ms or one.until_ms)
        .. ',"running":' .. tostring(one.run ~= '') .. '}'
      for _, region in ipairs(one.regions) do holders[region] = holder end
    end
  end
  local got, mine = {}, {}
  if reply[2] == '' then
    for at = FIRST_REGION, #ARGV do
      local region = ARGV[at]
      reply[#reply + 1] = holders[region] or ''
      if not holders[region] and not got[region] then
        got[region] = true
        mine[#mine + 1] = region
      end
    end
  end
  if reply[2] ~= '' or (#mine == 0 and #ARGV >= FIRST_REGION) then -- nothing is given
    if not dated then return reply end
    left = runs -- stored as of now, or it would never lapse
  else
    local before = {}
    for _, one in ipairs(runs) do
      if one.owner == owner and one.run == run then
        before = one.regions
      else
        local regions = {}
        for _, region in ipairs(one.regions) do
          if not got[region] then regions[#regions + 1] = region end
        end
        one.regions = regions
        if #regions > 0 or (one.tick ~= '' and blocks(one)) then left[#left + 1] = one end
      end
    end
    for _, region in ipairs(before) do
      if not got[region] then mine[#mine + 1] = region end
    end
    left[#left + 1] = {
      owner = owner, run = run, machine = machine, host = host, seen_ms = now_ms, alive_until_ms = now_ms + lease_ms,
      until_ms = now_ms + hold_ms, tick = tick, regions = mine,
    }
  end
end

local until_ms = 0
for _, one in ipairs(left) do until_ms = math.max(until_ms, one.until_ms) end
for _, one in pairs(ticks) do until_ms = math.max(until_ms, one) end
if until_ms == 0 then
  if known[1] then redis.call('HDEL', state, 'claim:' .. name) end
  return reply
end
local keep_ms = math.max(MAX_HOLD_MS, until_ms - now_ms)
local short = redis.call('PTTL', state) < keep_ms
-- L22. Tried before anything is written, where it does no harm: Redis takes nothing back when a script fails.
if short then redis.call('PEXPIRE', state, int(keep_ms)) end
local record = cjson.encode({ runs = left, ticks = ticks })
redis.call('HSET', state, 'format', FORMAT, 'claim:' .. name, int(until_ms) .. ' ' .. record)
if short then redis.call('PEXPIRE', state, int(keep_ms)) end
return reply
