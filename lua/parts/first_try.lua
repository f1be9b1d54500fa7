-- L16. Of charges with these idempotency keys that were asked for at `asked_ms`, the ids, if they are in the log: they are there
-- together. `since` is an id that the caller had seen before, or false. Of those that were trimmed since, the ids follow from
-- the others'.
local function first_try(log, keys, asked_ms, since)
  local since_id, to = since and '(' .. since or int(math.max(0, asked_ms - CLOCK_SLACK_MS)), '+'
  local place, ids, looked = {}, {}, 0
  for index, key in ipairs(keys) do place[key] = index end
  repeat
    local entries = redis.call('XREVRANGE', log, to, since_id, 'COUNT', CHUNK)
    for _, entry in ipairs(entries) do
      local index = place[entry[2][10]]
      if index then ids[index] = entry[1] end
    end
    looked = looked + #entries
    local oldest = entries[CHUNK]
    to = oldest and '(' .. oldest[1]
    local is_older = oldest and split(oldest[1]) < asked_ms - 100
  until next(ids) or not oldest or looked >= (is_older and MAX_BEFORE or MAX_LOOKED)
  local found, id = next(ids)
  if not found then return nil end
  local ms, seq = split(id)
  for index = 1, #keys do ids[index] = ids[index] or int(ms) .. '-' .. int(seq + index - found) end
  return ids
end
