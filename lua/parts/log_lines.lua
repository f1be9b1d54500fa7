-- The line of an entry; nil if another program wrote the entry.
local function line_of(entry)
  local fields = entry[2]
  return fields[1] == 'e' and not fields[3] and fields[2] or nil
end
-- The entry of a line; nil if it has another format, or units of more than 15 digits, as for `unpacked` in quota/rules/entry.py.
-- `at_ms` and `at_seq` are the id of a corrected charge, or a period.
local function entry_in(line)
  local kind, units, key, bucket, method, job, region, rest = string.match(line or '',
    '^([com]?)(%d+)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)\t([^\t]*)(.*)$')
  local of, at_ms, at_seq, before_units = string.match(rest or '', '^\t([^\t]*)\t(%d+)%-(%d+)\t(%d+)$')
  local is_short = kind == '' or kind == 'm'
  if not kind or is_short and rest ~= '' or not is_short and not of then return nil end
  if #units > 15 or #(before_units or '') > 15 then return nil end
  return { kind = kind, units = units + 0, key = key, bucket = bucket, method = method, job = job, region = region,
    of = of, at_ms = at_ms, at_seq = at_seq, before_units = (before_units or 0) + 0 }
end
