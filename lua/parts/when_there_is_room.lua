-- L9. Of a sliding view that refuses: the ms of the charge that must leave its window before the call fits. Its charges leave in
-- the order of the log, and between them expires what was lost (L17), so it may also be that of one that would leave with such
-- an expiry. `-` where the log must be read for it: more must leave than may be read here. Then how much was read.
local function when_there_is_room(view, counts, room, may_read)
  local left, from, expiries, expired = view.total + view.unlogged, view.tail, view.expiries or {}, 0
  if #expiries > 1 then table.sort(expiries, function(a, b) return a.ms < b.ms end) end
  local read, size = 0, 1
  while room >= 0 and read < may_read do
    size = math.min(size, may_read - read)
    local entries = redis.call('XRANGE', log, from, '+', 'COUNT', size)
    read = read + #entries
    for index = 1, #entries < size and #entries + 1 or size do
      local entry = entries[index]
      local text = entry and string.match(entry[1], '^%d+')
      local ms = text and tonumber(text) or math.huge -- behind the last one all expires
      while expiries[expired + 1] and expiries[expired + 1].ms <= ms + view.leaving_ms do
        expired = expired + 1
        left = left - expiries[expired].units
        if left <= room then return int(math.max(0, expiries[expired].ms - view.leaving_ms)), read end
      end
      if not entry then return '-', read end
      left, from = left - counts(entry), '(' .. entry[1]
      if left <= room then return text, read end
    end
    size = size * 2
  end
  return '-', read
end
