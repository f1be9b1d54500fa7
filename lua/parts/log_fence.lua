-- Whether what stands is this fence, which its owner may have renewed.
local function is_of(fence, stands)
  local token = string.match(fence, '^(~.*):%d*$')
  return token ~= nil and string.match(stands, '^(~.*):%d*$') == token
end
