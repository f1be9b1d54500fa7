-- inbound_log.lua: admit and count a visitor's request, or refuse it, exactly: every request of the last window_ms counts in full.
--
-- Guarantee: one atomic step over all limits of a rule: all of them count the request, or none. No span of window_ms admits
-- more than `number` units. Memory: an entry for each request, at most `number` for each identity and limit, and at most
-- 1,000. Rules I1 to I6 in docs/inbound-algorithms.md.
--
-- KEYS, ARGV and reply are those of inbound_counter.lua, except that
--       - number is at most 1,000
--       - the names in ARGV are not used: KEYS has two lists for each limit, the identity's requests in the current window
--         and in the previous window
--       - callers that count rejected requests need lists with other names
--       - an entry is three numbers of 4, 6 and 2 bytes: its time in ms since the window began, the units that the window
--         had counted before it, and its own units. So a total is the difference of two entries

-- @include parts/clock.lua
-- @include parts/inbound_limits.lua

local MAX_LOG, MAX_WINDOW_MS, CHUNK = 1000, 2678400000, 16 -- 31 days: 4 bytes hold no more than 49
local ENTRY = '>I4I6I2'

-- An entry's time, the units before it, and its own units; nothing if there is no entry.
local function at(key, index)
  local text = redis.call('LINDEX', key, index)
  if text then return struct.unpack(ENTRY, text) end
end

-- Removes entries from the front, a few at a time, while `gone` returns true, which it never does for the last entry. Returns the
-- units before the first entry that stays.
local function drop(key, gone)
  local dropped = 0
  while true do
    local texts = redis.call('LRANGE', key, dropped, dropped + CHUNK - 1)
    for n = 1, #texts do
      local came_ms, before, units = struct.unpack(ENTRY, texts[n])
      if not gone(came_ms, before, units) then
        if dropped > 0 then redis.call('LTRIM', key, dropped, -1) end
        return before
      end
      dropped = dropped + 1
    end
    if #texts == 0 then error('inbound_log.lua: a list is damaged') end
  end
end

-- The time until the oldest entries with `too_much` units stop counting, each window_ms after it came. `start` is the count before
-- these entries, and `ahead_ms` the time since the list's window began.
local function ends_in_ms(limit, key, start, too_much, ahead_ms)
  local from = 0
  while true do
    local texts = redis.call('LRANGE', key, from, from + CHUNK - 1)
    for n = 1, #texts do
      local came_ms, before, units = struct.unpack(ENTRY, texts[n])
      if before + units - start >= too_much then return came_ms + limit.window_ms - ahead_ms end
    end
    if #texts == 0 then return 0 end
    from = from + CHUNK
  end
end

for n = 1, #limits do
  if limits[n].number > MAX_LOG or limits[n].window_ms > MAX_WINDOW_MS then
    return redis.error_reply('ERR inbound_log.lua: number is at most ' .. MAX_LOG .. ', and window_ms '
      .. string.format('%.0f', MAX_WINDOW_MS) .. '; take inbound_counter.lua')
  end
end

-- A limit keeps for each list the time of the last entry (new_ms, old_ms; nil if no entry counts), the units including this entry
-- (new_end, old_end), and how many of them count (current, previous).
local function read(limit)
  local at_ms = limit.at_ms
  local new_ms, new_before, new_units = at(limit.current_key, -1)
  local old_ms, old_before, old_units = at(limit.previous_key, -1)
  limit.met = new_ms and 2 or old_ms and 1 or 0
  limit.new_ms, limit.new_end = new_ms, 0
  if new_ms then
    limit.new_end = new_before + new_units
    limit.current = limit.new_end
    if count_rejected then -- rejected requests may have pushed out the oldest; otherwise a list begins at 0
      local _, start = at(limit.current_key, 0)
      limit.current = limit.new_end - start
    end
  end
  if old_ms and old_ms <= at_ms then -- no entry counts any more
    redis.call('DEL', limit.previous_key)
  elseif old_ms then
    local first_ms, start = at(limit.previous_key, 0)
    if first_ms <= at_ms then
      start = drop(limit.previous_key, function(came_ms) return came_ms <= at_ms end)
    end
    limit.old_ms, limit.old_end = old_ms, old_before + old_units
    limit.previous = limit.old_end - start
  end
end

local function wait_ms(limit)
  local too_much = limit.previous + limit.current + cost - limit.number
  if too_much <= 0 then return 0 end
  if too_much <= limit.previous then
    return ends_in_ms(limit, limit.previous_key, limit.old_end - limit.previous, too_much, limit.at_ms + limit.window_ms)
  end
  return ends_in_ms(limit, limit.current_key, limit.new_end - limit.current, too_much - limit.previous, limit.at_ms)
end

local function count(limit, admitted)
  -- Entries stay in order if the clock goes back.
  local came_ms = limit.new_ms and math.max(limit.at_ms, limit.new_ms) or limit.at_ms
  redis.call('RPUSH', limit.current_key, struct.pack(ENTRY, came_ms, limit.new_end, cost))
  limit.new_ms, limit.new_end, limit.current = came_ms, limit.new_end + cost, limit.current + cost
  if admitted then return end
  -- Entries before the newest `number` units cannot change a decision.
  if limit.old_ms and limit.current >= limit.number then
    redis.call('DEL', limit.previous_key)
    limit.old_ms, limit.previous = nil, 0
  elseif limit.old_ms then
    limit.previous = limit.old_end - drop(limit.previous_key, function(_, before, units)
      return limit.current + limit.old_end - before - units >= limit.number
    end)
  end
  if not limit.old_ms then
    limit.current = limit.new_end - drop(limit.current_key, function(_, before, units)
      return limit.new_end - before - units >= limit.number
    end)
  end
end

local function rest(limit)
  local last_ms = limit.new_ms and limit.new_ms + limit.window_ms or limit.old_ms
  return math.max(limit.number - limit.previous - limit.current, 0), last_ms and last_ms - limit.at_ms or 0
end

-- @include parts/inbound_decide.lua
