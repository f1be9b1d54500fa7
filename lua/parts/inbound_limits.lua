-- Reads the limits from ARGV. Returns at once if the server's clock is in other windows than the caller's.
local FIRST, FIELDS, MAX_LIMITS, MAX_SCALE = 4, 6, 8, 4503599627370496 -- 2^52
local now_ms, cost, count_rejected = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1'
if not (now_ms and now_ms >= 0 and now_ms % 1 == 0
    and #KEYS >= 2 and #KEYS <= 2 * MAX_LIMITS and #ARGV == FIRST - 1 + FIELDS * #KEYS / 2) then
  return redis.error_reply('ERR inbound: 1 to 8 limits with 2 keys and 6 arguments each are needed, and a time in whole ms')
end
now_ms = clock(now_ms)
local limits = {}
for n = 1, #KEYS / 2 do
  local first = FIRST + FIELDS * (n - 1)
  local number, window_ms, burst = tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
  local window = tonumber(ARGV[first + 3])
  if not (cost and number and window_ms and burst and window
      and cost % 1 == 0 and number % 1 == 0 and window_ms % 1 == 0 and burst % 1 == 0 and window % 1 == 0
      and number >= 1 and window_ms >= 1 and number * window_ms <= MAX_SCALE
      and burst >= 0 and burst <= number and cost >= 1 and cost <= (burst > 0 and burst or number)) then
    return redis.error_reply('ERR inbound: number, window_ms, burst, window and cost are whole numbers from 1, '
      .. 'burst up to number, cost up to either, and number * window_ms up to 2^52')
  end
  local at_ms = now_ms - window * window_ms
  if at_ms < 0 or at_ms >= window_ms then return { -1, now_ms } end
  -- A table of 12 to 16 fields need not grow later, which would take longer than a command.
  limits[n] = { number = number, window_ms = window_ms, burst = burst, at_ms = at_ms,
    current_key = KEYS[2 * n - 1], previous_key = KEYS[2 * n], name = ARGV[first + 4], previous_name = ARGV[first + 5],
    met = 0, wait_ms = 0, current = 0, previous = 0 }
end
