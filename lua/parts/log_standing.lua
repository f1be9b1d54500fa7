-- The epoch of a log as it stands: that of its state, but '~:0', a fence that is over, where the server has evicted one of its
-- keys. Then nobody appends, and whoever asks puts the log together anew. `holds` says how many of the keys log and corrected
-- there must be.
local function standing(epoch, holds)
  if string.find(epoch, '^[~!]') then return epoch, true end
  local is_whole = redis.call('EXISTS', log, corrected) == holds and (epoch ~= '' or holds == 0)
  return is_whole and epoch or '~:0', not is_whole
end
