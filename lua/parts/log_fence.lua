-- Whether the epoch `stands` is this fence, perhaps renewed by its owner.
local function is_of(fence, stands)
  local token = string.match(fence, '^(~.*):%d*$')
  return token ~= nil and string.match(stands, '^(~.*):%d*$') == token
end
