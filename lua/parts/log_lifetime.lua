-- The keys of a log live for 35 days, or for the longest window ever named plus 25 hours, whichever is longer.
local PAST_MS, SLACK_MS = 3024000000, 90000000
local function lifetime_ms(keep_ms) return math.max(PAST_MS, keep_ms + SLACK_MS) end
local function live_on(keep_ms)
  for _, key in ipairs({ log, state, corrected }) do redis.call('PEXPIRE', key, int(lifetime_ms(keep_ms))) end
end
