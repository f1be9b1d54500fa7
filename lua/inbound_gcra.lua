-- inbound_gcra.lua: admit a visitor's request and count it, evenly spaced but for a burst (generic cell rate algorithm).
--
-- Guarantee: one atomic step over all limits of a rule: all of them count the request, or none. A limit lets `burst` units
-- come at once, and gives them back evenly, `number` in a window. Constant memory: one number for each identity, limit
-- and window. Rules I1 to I5 in docs/inbound-algorithms.md.
--
-- KEYS, ARGV and the reply are those of inbound_counter.lua; burst is 1 to number, and cost up to burst. A hash holds for
-- each identity when all is free again, in 1/number ms since the window began: a unit takes window_ms of these. It is stored
-- in as few bytes as it needs, the highest first: as text it would take twice the memory.

-- >>> clock
-- The server's clock in ms, or the time that was given, for tests and simulation.
local function clock(given_ms)
  if given_ms ~= 0 then return given_ms end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
-- <<< clock

-- >>> limits
-- The limits, for the windows that the server's clock is in. Where the caller means other windows, this is the end.
local FIRST, FIELDS, MAX_LIMITS, MAX_SCALE = 4, 6, 8, 4503599627370496 -- 2^52
local now_ms, cost, count_rejected = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1'
if not (now_ms and now_ms >= 0 and #KEYS >= 2 and #KEYS <= 2 * MAX_LIMITS and #ARGV == FIRST - 1 + FIELDS * #KEYS / 2) then
  return redis.error_reply('ERR inbound: 1 to 8 limits with 2 keys and 6 arguments each are needed, and a time')
end
now_ms = clock(now_ms)
local limits = {}
for n = 1, #KEYS / 2 do
  local first = FIRST + FIELDS * (n - 1)
  local number, window_ms, burst = tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
  local window = tonumber(ARGV[first + 3])
  if not (cost and number and window_ms and burst and window
      and cost % 1 == 0 and number % 1 == 0 and window_ms % 1 == 0 and burst % 1 == 0
      and number >= 1 and window_ms >= 1 and number * window_ms <= MAX_SCALE
      and burst >= 0 and burst <= number and cost >= 1 and cost <= (burst > 0 and burst or number)) then
    return redis.error_reply('ERR inbound: number, window_ms, burst, window and cost are whole numbers from 1, '
      .. 'burst up to number, cost up to either, and number * window_ms up to 2^52')
  end
  local at_ms = now_ms - window * window_ms
  if at_ms < 0 or at_ms >= window_ms then return { -1, now_ms } end
  -- With 12 to 16 fields a table does not grow any more, which would take longer than a command.
  limits[n] = { number = number, window_ms = window_ms, burst = burst, at_ms = at_ms,
    current_key = KEYS[2 * n - 1], previous_key = KEYS[2 * n], name = ARGV[first + 4], previous_name = ARGV[first + 5],
    known = 0, wait_ms = 0, current = 0, previous = 0 }
end
-- <<< limits

local function pack(n)
  local size = 1
  while n >= 256 ^ size do size = size + 1 end
  return struct.pack('>I' .. size, n)
end
local function unpack_state(text) return (struct.unpack('>I' .. #text, text)) end

-- Not before now. No state reaches further than one burst ahead, but where the clock went back.
local function gcra_wait_ms(limit)
  local too_much = limit.free_at + (cost - limit.burst) * limit.window_ms - limit.at_ms * limit.number
  return too_much > 0 and math.ceil(too_much / limit.number) or 0
end

local admitted = true
for n = 1, #limits do
  local limit = limits[n]
  if limit.burst == 0 then return redis.error_reply('ERR inbound_gcra.lua: burst is a whole number from 1 to number') end
  local now = limit.at_ms * limit.number
  local current = redis.call('HGET', limit.current_key, limit.name)
  local previous = not current and redis.call('HGET', limit.previous_key, limit.previous_name)
  limit.known = current and 2 or previous and 1 or 0
  limit.most = now + limit.burst * limit.window_ms
  local free_at = current and unpack_state(current) or previous and unpack_state(previous) - limit.window_ms * limit.number or 0
  limit.free_at = math.max(now, math.min(free_at, limit.most))
  limit.wait_ms = gcra_wait_ms(limit)
  if limit.wait_ms > 0 then admitted = false end
end

if admitted or count_rejected then
  for n = 1, #limits do
    local limit = limits[n]
    -- A rejected request takes what is left, and no more.
    limit.free_at = math.min(limit.free_at + cost * limit.window_ms, limit.most)
    redis.call('HSET', limit.current_key, limit.name, pack(limit.free_at))
    if limit.known < 2 then -- the hash may be new
      redis.call('PEXPIRE', limit.current_key, string.format('%.0f', 2 * limit.window_ms - limit.at_ms))
    end
    if not admitted then limit.wait_ms = gcra_wait_ms(limit) end
  end
end

local reply = { admitted and 1 or 0, now_ms }
for n = 1, #limits do
  local limit = limits[n]
  reply[4 * n - 1] = math.floor((limit.most - limit.free_at) / limit.window_ms)
  reply[4 * n] = math.ceil((limit.free_at - limit.at_ms * limit.number) / limit.number)
  reply[4 * n + 1] = limit.wait_ms
  reply[4 * n + 2] = limit.known
end
return reply
