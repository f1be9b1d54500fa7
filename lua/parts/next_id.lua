-- The time and number of the entry after `last`: ids never go back, whatever the clock says. Within a millisecond, numbers skip up
-- to 2^20, so that two histories of a log seldom get one id. `next_id` in quota/ledger/log.py is the same rule.
local function next_id(last, clock_ms, seq)
  local last_ms, last_seq = string.match(last, '^(%d+)-(%d+)$')
  if last_ms + 0 < clock_ms then return int(clock_ms), seq + 0 end
  return last_ms, last_seq + 1 + seq % 1048576
end
