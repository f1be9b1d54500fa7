-- trim.lua: move entries that left every window from a project's log to its past, a few at a time.
--
-- Guarantee: one atomic step. A correction that leaves is deleted from `corrected`, unless a newer one is noted there. Entries that
-- no program of ours can read are deleted. Nothing moves while appends are fenced off, or after a key was evicted.
--
-- KEYS  1 log  2 state  3 corrected  4 past, as in append.lua
-- ARGV  1 clock_ms   0 = the server's clock; another value is for tests and simulation
--       2 before_ms  move entries dated before this
--       3 count      the most entries to move, up to 250
-- Reply {moved, ID, LINE, ID, LINE, ...}: how many entries left the log, and those that belong before the newest entry of the past

local log, state, corrected, past = unpack(KEYS)
local before_ms, count = ARGV[2], math.min(tonumber(ARGV[3]), 250)

-- @include parts/clock.lua
-- @include parts/ids.lua
-- @include parts/log_lines.lua
-- @include parts/log_standing.lua
-- @include parts/log_lifetime.lua
-- @include parts/log_rights.lua
-- @include parts/log_past.lua

local clock_ms = clock(tonumber(ARGV[1]))
local fields = redis.call('HMGET', state, 'epoch', 'holds')
local holds = tonumber(fields[2] or 0) or 0
local _, is_closed = standing(fields[1] or '', holds)
if is_closed then return { 0 } end
local entries = redis.call('XRANGE', log, '-', '(' .. before_ms .. '-0', 'COUNT', count + 1)
local moved = math.min(#entries, count)
if moved == 0 then return { 0 } end

local newest = redis.call('XREVRANGE', past, '+', '-', 'COUNT', 1)[1]
newest = newest and newest[1] or '0-0'
try_rights()
redis.call('HSET', state, 'trimmed', entries[moved][1])
local reply = { moved }
for at = 1, moved do
  local id, line = entries[at][1], line_of(entries[at])
  local entry = entry_in(line)
  local note = entry and entry.kind == 'c' and redis.call('HMGET', corrected, entry.of)[1]
  if note and string.match(note, '%S+$') == id then redis.call('HDEL', corrected, entry.of) end
  if entry and before(newest, id) then
    redis.call('XADD', past, id, 'e', line)
    newest = id
  elseif entry and #redis.call('XRANGE', past, id, id) == 0 then
    reply[#reply + 1] = id
    reply[#reply + 1] = line
  end
end
redis.call('XTRIM', log, 'MINID', #entries > moved and entries[moved + 1][1] or before_ms)
if holds == 2 and redis.call('EXISTS', corrected) == 0 then redis.call('HSET', state, 'holds', 1) end
keep_past(clock_ms)
return reply
