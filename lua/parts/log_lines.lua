-- The line of an entry; nil if another program wrote the entry.
local function line_of(entry)
  local fields = entry[2]
  return fields[1] == 'e' and not fields[3] and fields[2] or nil
end
-- Whether a line has our format.
local function is_readable(line)
  local kind, rest = string.match(line, '^([com]?)%d+\t[^\t]*\t[^\t]*\t[^\t]*\t[^\t]*\t[^\t]*(.*)$')
  if kind == '' or kind == 'm' then return rest == '' end
  return kind ~= nil and string.find(rest, '^\t[^\t]*\t%d+%-%d+\t%d+$') ~= nil
end
-- From the line of a correction: the units that its charge counts from now on, and the key of the charge.
local function correction_in(line)
  return string.match(line, '^c(%d+)\t[^\t]*\t[^\t]*\t[^\t]*\t[^\t]*\t[^\t]*\t([^\t]*)\t%d+%-%d+\t%d+$')
end
