-- Deletes a session; whoever still holds its lease finds it gone.
-- KEYS[1] session hash  KEYS[2] token log
-- ARGV: 1 tenant
-- Returns the record as it was: fields and values; empty when there is none of this tenant's.
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return {} end
local record = redis.call('HGETALL', KEYS[1])
redis.call('DEL', KEYS[1], KEYS[2])
return record
