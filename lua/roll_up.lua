-- roll_up.lua: add up the charges of hours that are over, for the history.
--
-- Guarantee: one atomic step, outside of every decision. Each charge is added once, in the order of the log: the id of the
-- last one stands in the history itself, so both are lost together and rebuilt together. At most 100 charges of one hour
-- are added at a time; call again while the reply says that there is more. The rule is L29 in docs/ledger-rules.md.
--
-- KEYS  1 log   2 state   3 corrections     (see charge.lua)
--       4 history   hash, quota:{PROJECT}:history:
--                   rolled_up        the id of the last charge that was added; the state has a copy, which trimming obeys
--                   whole_after_ms   the history has every charge that is newer than this, except for the gap
--                   gap              "FROM_MS TO_MS": charges after the first and up to the second may be missing
--                   hour:N           the hour that begins at N hours since 1970: a line for each method, job, region and
--                                    bucket, "METHOD|JOB|REGION|BUCKET CHARGES UNITS", with units after corrections
--                   sums             since the history began: "METHOD|JOB CHARGES UNITS CORRECTED", with one charge for each
--                                    call, the units as they were charged, and the units by which corrections changed
--                                    them. Never lowered
--                   sums_after       charges up to this id were in the sums of a history that was lost
--                   refused:N, refusals, refusal:N   see add_refusals.lua
--                   swept_hour       what is older than the history was removed up to this hour
-- ARGV  1 now_ms      0 = the server's clock
--       2 caller_ms   the caller's clock, the second witness; 0 = none
--       3 all         1 = also of hours that are not over: before a repair (see repair.lua), and for a reader of the sums as they
--                     are now; else 0 or nothing
-- Reply { how many charges were added, 1 if there is more to do, else 0 }

local log, state, corrections, history = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local clock_ms, caller_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local CHUNK, HOUR_MS = 100, 3600000
local HISTORY_MS = 3024000000 -- 35 days

if #KEYS ~= 4 or not (clock_ms and caller_ms and clock_ms >= 0 and caller_ms >= 0) then
  return redis.error_reply('ERR roll_up.lua: 4 keys are needed, and now_ms and caller_ms are numbers')
end

-- @include parts/int.lua
-- @include parts/clock.lua
clock_ms = clock(clock_ms)

-- @include parts/clocks_agree.lua

if not clocks_agree(clock_ms, caller_ms) then return { 0, 0 } end -- nobody knows which hours are over
local now_ms = clock_ms
if caller_ms > 0 and caller_ms + CLOCK_SLACK_MS < now_ms then now_ms = caller_ms + CLOCK_SLACK_MS end

-- @include parts/ids.lua
-- @include parts/format.lua
-- @include parts/bucket_and_units.lua
-- @include parts/cells.lua

local known = redis.call('HMGET', state, 'last', 'trimmed_through_ms', 'rolled_up', 'format', 'epoch')
local unknown_format = other_format(known[4], known[5])
if unknown_format then return unknown_format end
if not known[1] then return { 0, 0 } end -- nothing was charged, or the state was evicted: charge.lua makes it again
local trimmed_through_ms = tonumber(known[2]) or 0

local fields = redis.call('HMGET', history, 'rolled_up', 'whole_after_ms', 'gap', 'sums', 'sums_after', 'swept_hour')
local rolled, whole_after_ms = fields[1], tonumber(fields[2]) or 0
local dirty = {}
local function set(field, value)
  dirty[#dirty + 1] = field
  dirty[#dirty + 1] = value
end
local sums_after = fields[5]
if not rolled then
  -- It begins with what the log still has. The state remembers what an earlier history, lost since, had in its sums.
  rolled, whole_after_ms, sums_after = '0-0', trimmed_through_ms, known[3] or '0-0'
  set('whole_after_ms', int(whole_after_ms))
  set('sums_after', sums_after)
elseif before(known[1], rolled) then
  rolled = '0-0' -- ids never go back within a log: this is another one
end

-- Of what the log lost before it was rolled up only the time is known.
local oldest = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1]
local seen_ms = math.max(whole_after_ms, (split(rolled)))
if trimmed_through_ms > seen_ms and not (oldest and not before(rolled, oldest[1])) then
  local from_ms, to_ms = string.match(fields[3] or '', '^(%d+) (%d+)$')
  from_ms, to_ms = tonumber(from_ms), tonumber(to_ms)
  if to_ms and to_ms >= now_ms - HISTORY_MS then
    from_ms, to_ms = math.min(from_ms, seen_ms), math.max(to_ms, trimmed_through_ms)
  else
    from_ms, to_ms = seen_ms, trimmed_through_ms
  end
  local gap = int(from_ms) .. ' ' .. int(to_ms)
  if gap ~= fields[3] then set('gap', gap) end
end

-- The charges of one hour that is over.
local over_ms = math.floor(now_ms / HOUR_MS) * HOUR_MS
local newest = ARGV[3] == '1' and '+' or int(math.max(0, over_ms - 1))
local entries = redis.call('XRANGE', log, '(' .. rolled, newest, 'COUNT', CHUNK)
local hour = entries[1] and math.floor(split(entries[1][1]) / HOUR_MS)
local ids = {}
for at, entry in ipairs(entries) do
  if math.floor(split(entry[1]) / HOUR_MS) ~= hour then break end
  ids[at] = entry[1]
end
if hour then
  local cells = cells_of(redis.call('HGET', history, 'hour:' .. int(hour)))
  local sums = cells_of(fields[4])
  local corrected = redis.call('EXISTS', corrections) == 1 and redis.call('HMGET', corrections, unpack(ids)) or {}
  for at, id in ipairs(ids) do
    local f = entries[at][2]
    local bucket, charged = bucket_and_units(f[2])
    charged = tonumber(charged) or 0
    local counted = corrected[at] and tonumber(corrected[at]) or charged
    add_to_cell(cells, cell_name(f[4], f[6], f[8], bucket), 1, counted)
    local first = not string.find(f[10], '%+[1-9]$') -- of a call that was charged to several buckets
    if before(sums_after, id) then add_to_cell(sums, cell_name(f[4], f[6]), first and 1 or 0, charged, 0) end
  end
  rolled = ids[#ids]
  set('hour:' .. int(hour), text_of(cells))
  set('sums', text_of(sums))
end
if rolled ~= fields[1] then set('rolled_up', rolled) end

-- What is older than the history goes, an hour after the other.
local last_old = math.floor((now_ms - HISTORY_MS) / HOUR_MS) - 1
local swept = math.max(tonumber(fields[6]) or last_old, -HISTORY_MS / HOUR_MS) -- a smaller number would never be counted up
swept = math.min(swept, last_old)
local sweep_to = math.min(last_old, swept + CHUNK)
local old = {}
for n = swept + 1, sweep_to do
  old[#old + 1] = 'hour:' .. int(n)
  old[#old + 1] = 'refused:' .. int(n)
end

-- L22. What may fail is tried where it does no harm.
redis.call('PEXPIRE', history, HISTORY_MS)
redis.call('HDEL', history, '')
if int(sweep_to) ~= fields[6] then set('swept_hour', int(sweep_to)) end
if #old > 0 and (sweep_to + 1) * HOUR_MS > whole_after_ms then
  whole_after_ms = (sweep_to + 1) * HOUR_MS - 1
  set('whole_after_ms', int(whole_after_ms))
end
if #dirty > 0 then redis.call('HSET', history, unpack(dirty)) end
if #old > 0 then redis.call('HDEL', history, unpack(old)) end
redis.call('PEXPIRE', history, HISTORY_MS)
if rolled ~= known[3] then redis.call('HSET', state, 'rolled_up', rolled) end
return { #ids, (#ids < #entries or #entries == CHUNK or sweep_to < last_old) and 1 or 0 }
