-- A whole number as text; Lua itself would write 1e+15.
local function int(n) return string.format('%.0f', n) end
-- The server's clock in ms, or `given_ms` for tests and simulation.
local function clock(given_ms)
  if given_ms ~= 0 then return given_ms end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
