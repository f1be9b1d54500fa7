-- The server's clock in ms, or the time that was given, for tests and simulation.
local function clock(given_ms)
  if given_ms ~= 0 then return given_ms end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
