-- L29. A table of numbers by name, kept as text: a line "NAME NUMBER NUMBER ..." for each. After MAX_CELLS names, all that
-- is new counts under OTHER.
local MAX_CELLS, MAX_NAME = 200, 256
local OTHER = '*'
local function cells_of(text)
  local cells = { names = {}, of = {} }
  for name, numbers in string.gmatch(text or '', '([^ \n]+) ([^\n]*)') do
    local row = {}
    for number in string.gmatch(numbers, '%-?%d+') do row[#row + 1] = tonumber(number) end
    if not cells.of[name] then cells.names[#cells.names + 1] = name end
    cells.of[name] = row
  end
  return cells
end
-- The name of the cell for these parts: joined by |, with the characters that separate written as %XX.
local function cell_name(...)
  local parts = { ... }
  for at, part in ipairs(parts) do
    parts[at] = string.gsub(string.sub(part, 1, MAX_NAME), '[%%|%c ]', function(c)
      return string.format('%%%02X', string.byte(c))
    end)
  end
  return table.concat(parts, '|')
end
local function add_to_cell(cells, name, ...)
  if not cells.of[name] then
    if #cells.names >= MAX_CELLS then name = OTHER end
    if not cells.of[name] then
      cells.names[#cells.names + 1] = name
      cells.of[name] = {}
    end
  end
  local row = cells.of[name]
  for at, number in ipairs({ ... }) do row[at] = math.max(0, (row[at] or 0) + number) end
end
local function text_of(cells)
  local lines = {}
  for at, name in ipairs(cells.names) do
    local words = { name }
    for _, number in ipairs(cells.of[name]) do words[#words + 1] = int(number) end
    lines[at] = table.concat(words, ' ')
  end
  return table.concat(lines, '\n')
end
