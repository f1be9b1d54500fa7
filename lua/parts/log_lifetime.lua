-- The keys of a log live for 35 days, or for the longest window ever named plus 25 hours, whichever is longer.
local PAST_MS, SLACK_MS = 3024000000, 90000000
-- A number of up to 15 digits. A longer number may be beyond 2^53, and Redis takes no such lifetime.
local function whole(text) return text and #text <= 15 and string.match(text, '^%d+$') and text + 0 end
local function lifetime_ms(longest_ms) return math.max(PAST_MS, longest_ms + SLACK_MS) end
local function live_on()
  local ms = int(lifetime_ms(whole(redis.call('HGET', state, 'longest_ms')) or 0))
  for _, key in ipairs({ log, state, corrected }) do redis.call('PEXPIRE', key, ms) end
end
