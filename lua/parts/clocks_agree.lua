-- L11. Neither clock is trusted where a caller's is further ahead of the server's, or further behind it, than these.
local CLOCK_SLACK_MS, CLOCK_BEHIND_MS = 5000, 3600000
local function clocks_agree(clock_ms, caller_ms)
  return caller_ms == 0 or (caller_ms <= clock_ms + CLOCK_SLACK_MS and caller_ms >= clock_ms - CLOCK_BEHIND_MS)
end
