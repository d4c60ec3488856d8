-- Counts output tokens of a tenant in the present minute; uncounts a stream that has ended and a deleted session.
-- KEYS[1] streams (sorted set)  KEYS[2] sessions (sorted set)  KEYS[3] tokens (hash)
-- ARGV: 1 tokens, 2 stream that has ended or '', 3 session that was deleted or ''
-- Returns the tokens of this minute.
local minute = math.floor(tonumber(redis.call('TIME')[1]) / 60)
-- Damaged counts restart at zero.
drop_others({'zset', 'zset', 'hash'})
local spent = redis.call('HMGET', KEYS[3], 'minute', 'tokens')
if count(spent[1]) ~= minute or not count(spent[2]) then
  redis.call('HSET', KEYS[3], 'minute', minute, 'tokens', 0)
end
if ARGV[2] ~= '' then redis.call('ZREM', KEYS[1], ARGV[2]) end
if ARGV[3] ~= '' then redis.call('ZREM', KEYS[2], ARGV[3]) end
redis.call('PEXPIRE', KEYS[3], 120000)
return redis.call('HINCRBY', KEYS[3], 'tokens', ARGV[1])
