-- The server's clock in ms, or the time that was given, for tests and simulation.
local function clock(given_ms)
  if given_ms ~= 0 then return given_ms, string.format('%.0f', given_ms) end
  local time = redis.call('TIME')
  local text = string.format('%s%03d', time[1], math.floor(time[2] / 1000))
  return tonumber(text), text
end
