-- A whole number as text; Lua itself would write 1e+15.
local function int(n) return string.format('%.0f', n) end
-- The server's clock in ms, or `given_ms` for tests and simulation.
local function clock(given_ms)
  if given_ms ~= 0 then return given_ms, string.format('%.0f', given_ms) end
  local time = redis.call('TIME')
  local text = time[1] .. string.sub('00000' .. time[2], -6, -4) -- TIME returns microseconds without leading zeros
  return text + 0, text
end
