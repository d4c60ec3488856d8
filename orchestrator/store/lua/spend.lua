-- Counts output tokens of a tenant in the present minute; a stream that ends, or a session that is gone, counts no more.
-- KEYS[1] streams (sorted set)  KEYS[2] sessions (sorted set)  KEYS[3] tokens (hash)
-- ARGV: 1 tokens, 2 stream that has ended or '', 3 session that is gone or ''
-- Returns the tokens of this minute.
local minute = math.floor(tonumber(redis.call('TIME')[1]) / 60)
-- Counts that were damaged begin anew.
drop_others({'zset', 'zset', 'hash'})
local spent = redis.call('HMGET', KEYS[3], 'minute', 'tokens')
if count(spent[1]) ~= minute or not count(spent[2]) then
  redis.call('HSET', KEYS[3], 'minute', minute, 'tokens', 0)
end
if ARGV[2] ~= '' then redis.call('ZREM', KEYS[1], ARGV[2]) end
if ARGV[3] ~= '' then redis.call('ZREM', KEYS[2], ARGV[3]) end
redis.call('PEXPIRE', KEYS[3], 120000)
return redis.call('HINCRBY', KEYS[3], 'tokens', ARGV[1])
