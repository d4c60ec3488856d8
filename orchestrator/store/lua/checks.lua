-- Precedes every script: checks of values that other scripts wrote.

-- Returns a field's text as a whole number from 0 to 2^53; nil for any other text.
local function count(text)
  if not text or #text > 16 or not string.find(text, '^%d+$') then return nil end
  local number = tonumber(text)
  return number < 9007199254740992 and number or nil
end

-- Deletes the keys that have another type than the given one.
local function drop_others(kinds)
  for index, kind in ipairs(kinds) do
    local found = redis.call('TYPE', KEYS[index]).ok
    if found ~= 'none' and found ~= kind then redis.call('DEL', KEYS[index]) end
  end
end

