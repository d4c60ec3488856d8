-- Deletes a session. A mark stays, so that whoever still holds its lease does not take it for lost.
-- KEYS[1] session hash  KEYS[2] token log  KEYS[3] mark of a deleted session
-- ARGV: 1 tenant, 2 TTL of the mark in milliseconds
-- Returns the record as it was: fields and values; empty when there is none of this tenant's.
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[1] then return {} end
local record = redis.call('HGETALL', KEYS[1])
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('SET', KEYS[3], '1', 'PX', ARGV[2])
return record
