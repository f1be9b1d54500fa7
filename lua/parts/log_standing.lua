-- The epoch of a log: the epoch in its state, or '~:0', an expired fence, if the server evicted one of its keys, or another program
-- wrote bytes there that are no text. Then the first process that reads it rebuilds the log before anybody appends. `holds` is how
-- many of the keys log and corrected must exist.
local function standing(epoch, holds)
  if string.sub(epoch, 1, 1) ~= '!' and string.find(epoch, '[\128-\255]') then return '~:0', true end
  if string.find(epoch, '^[~!]') then return epoch, true end
  local is_whole = redis.call('EXISTS', log, corrected) == holds and (epoch ~= '' or holds == 0)
  return is_whole and epoch or '~:0', not is_whole
end
