-- settle.lua: set what a charge counts, absolutely. A refund settles to 0.
--
-- Guarantee: one atomic step; idempotent; never refused; the charge keeps its time and id. All views are kept up to date.
-- Nothing is written before all that may fail was tried.
--
-- KEYS  1 log   2 state   3 amended     (see charge.lua)
-- ARGV  1 id       of the charge, as charge.lua gave it
--       2 units    what it counts from now on, 0 or more
-- Reply { u, m, j, g, t, units it counted until now }, or nothing ({}) for an id that is not in the log

local log, state, amended = KEYS[1], KEYS[2], KEYS[3]
local PIECE = 1000
local id, units = ARGV[1], tonumber(string.match(ARGV[2] or '', '^%d+$'))
if not units then return redis.error_reply('ERR settle.lua: units are a whole number, 0 or more') end

-- Redis reads "1-0" and "01-0" alike, and "1" as the first of that millisecond; a correction is kept by the exact id.
local entry = redis.call('XRANGE', log, id, id)[1]
if not entry or entry[1] ~= id then return {} end
local f = entry[2]
local bucket, charged = string.match(f[2], '^(.*)=(%d+)$')
if not bucket then bucket, charged = 'units', f[2] end
local amended_units = redis.call('HGET', amended, id)
local counted = tonumber(amended_units or charged)
local known = redis.call('HMGET', state, 'last', 'corrected', 'cut_ms')
local cut_ms, lost_ms = tonumber(known[3]) or 0, nil
if known[1] and known[2] == '1' and redis.call('EXISTS', amended) == 0 then -- see charge.lua
  lost_ms = tonumber(string.match(known[1], '^%d+'))
  cut_ms = math.max(cut_ms, lost_ms)
end
-- What the views count of it: if a correction of it may have been lost nobody knows, and it may be nothing.
local in_views = counted
if not amended_units and tonumber(string.match(id, '^%d+')) <= cut_ms then in_views = 0 end

local function split(text)
  local ms, seq = string.match(text, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local function at_most(a, b)
  local a_ms, a_seq = split(a)
  local b_ms, b_seq = split(b)
  return a_ms < b_ms or (a_ms == b_ms and a_seq <= b_seq)
end
local function selects(list, name)
  if list == '*' then return true end
  name = string.gsub(name, '[%%,|*]', function(c) return string.format('%%%02X', string.byte(c)) end)
  return string.find(',' .. list .. ',', ',' .. name .. ',', 1, true) ~= nil
end
local function counts_as(n, calls)
  if calls then return math.min(n, 1) end
  return n
end

-- Views are the fields with three separators in their names; a bucket, a machine or a token may have them in its own.
local views = {}
local cursor = '0'
repeat
  local piece = redis.call('HSCAN', state, cursor, 'MATCH', '*|*|*|*', 'COUNT', PIECE)
  cursor = piece[1]
  for at = 1, #piece[2], 2 do
    local view, stored = piece[2][at], piece[2][at + 1]
    local buckets, methods, jobs, rest = string.match(view, '^([^|]*)|([^|]*)|([^|]*)|(.*)$')
    local total, tail, head, gone_ms = string.match(stored, '^(%d+) (%d+%-%d+) (%d+%-%d+) (%d+)$')
    if buckets and total and selects(buckets, bucket) and selects(methods, f[4]) and selects(jobs, f[6]) then
      if at_most(tail, id) and at_most(id, head) then
        local calls = string.find(rest, '|calls', 1, true)
        total = tonumber(total) + counts_as(units, calls) - counts_as(in_views, calls)
        views[view] = string.format('%.0f %s %s %s', total, tail, head, gone_ms)
      end
    end
  end
until cursor == '0'

local ttl_ms = redis.call('PTTL', log)
if ttl_ms > 0 then redis.call('PEXPIRE', amended, ttl_ms) end
if lost_ms then redis.call('HSET', state, 'cut_ms', string.format('%.0f', cut_ms)) end
redis.call('HSET', amended, id, string.format('%.0f', units))
if known[1] then redis.call('HSET', state, 'corrected', '1') end
if ttl_ms > 0 then redis.call('PEXPIRE', amended, ttl_ms) end
for view, text in pairs(views) do redis.call('HSET', state, view, text) end
return { f[2], f[4], f[6], f[8], f[10], string.format('%.0f', counted) }
