-- Ids are "ms-seq", compared by both numbers. `+ 0` makes a number of digits; `tonumber` would read them twice.
local function split(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  if ms then return ms + 0, seq + 0 end
end
local function before(a, b)
  local a_ms, a_seq = split(a)
  local b_ms, b_seq = split(b)
  return a_ms < b_ms or (a_ms == b_ms and a_seq < b_seq)
end
