-- A whole number as text: Lua would write 1e+15.
local function int(n) return string.format('%.0f', n) end
