-- Deletes a session, even one with a damaged record. A mark stays, so that the owner of its lease does not restore it.
-- KEYS[1] session hash  KEYS[2] token log  KEYS[3] mark of a deleted session
-- ARGV: 1 TTL of the mark in milliseconds
-- Returns the field `created` of the record, '' without one; nil when there is no session.
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local created = redis.call('TYPE', KEYS[1]).ok == 'hash' and redis.call('HGET', KEYS[1], 'created') or ''
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('SET', KEYS[3], '1', 'PX', ARGV[1])
return created
