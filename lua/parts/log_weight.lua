-- How much an unread entry takes of an author's room, as `weight` in quota/ledger/log.py.
--
-- The entry of a line; nil if its weight is unknown: for a marker, and for a line of another format.
local function entry_in(line)
  local kind, units, key, bucket, method, job, rest = match(line or '',
    '^([co]?)(%d+)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t[^\t]*(.*)$')
  if not kind then return nil end
  local of, before_units = match(rest, '^\t([^\t]*)\t%d+%-%d+\t(%d+)$')
  if kind == '' and rest ~= '' or kind ~= '' and not of then return nil end
  return { kind = kind, key = key, units = units + 0, before_units = (before_units or 0) + 0, of = kind == 'c' and of,
    bucket = bucket, method = method, job = job }
end
local function has(names, name)
  for _, named in ipairs(names) do
    if named == name then return true end
  end
  return #names == 0
end
local function weight(entry, room)
  local units, before_units = entry.units, entry.before_units
  if room then
    local _, counts_calls, buckets, methods, jobs = unpack(room)
    if not has(buckets, entry.bucket) then return 0 end
    if entry.kind ~= 'o' then
      if not (has(methods, entry.method) and has(jobs, entry.job)) then return 0 end
      if counts_calls == 1 then units, before_units = math.min(units, 1), math.min(before_units, 1) end
    end
  end
  return entry.kind == 'c' and math.max(0, units - before_units) or math.max(1, units)
end
