-- Counts a request against its tenant's limits, or renews the count of one that was admitted.
-- KEYS[1] streams (sorted set: id, deadline)  KEYS[2] sessions (sorted set: id, deadline)  KEYS[3] tokens (hash)
-- ARGV: 1 stream id, 2 session id, '' for one that does not count, 3 lease of a stream in microseconds, 4 TTL of a session in milliseconds,
--       5 streams at most, 6 sessions at most, 7 tokens a minute at most (each 0 for no limit), 8 '1' renews
-- Returns {outcome, seconds to wait}; outcome: 'ok', 'streams', 'sessions', 'tokens'.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
-- Damaged counts restart at zero: damage is no reason to refuse a tenant's requests.
drop_others({'zset', 'zset', 'hash'})
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
if ARGV[8] ~= '1' then
  local streams, sessions, tokens = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
  -- A repetition whose first reply was lost has been counted already.
  if streams > 0 and not redis.call('ZSCORE', KEYS[1], ARGV[1]) and redis.call('ZCARD', KEYS[1]) >= streams then
    return {'streams', 1}
  end
  if sessions > 0 and ARGV[2] ~= '' and not redis.call('ZSCORE', KEYS[2], ARGV[2]) and redis.call('ZCARD', KEYS[2]) >= sessions then
    return {'sessions', 60}
  end
  local spent = redis.call('HMGET', KEYS[3], 'minute', 'tokens')
  local minute = math.floor(tonumber(clock[1]) / 60)
  if tokens > 0 and count(spent[1]) == minute and (count(spent[2]) or 0) >= tokens then
    return {'tokens', 60 - tonumber(clock[1]) % 60}
  end
end
local ttl = tonumber(ARGV[4])
redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[3])), ARGV[1])
redis.call('PEXPIRE', KEYS[1], math.ceil(tonumber(ARGV[3]) / 1000))
if ARGV[2] ~= '' then
  redis.call('ZADD', KEYS[2], string.format('%.0f', now + 1000 * ttl), ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ttl)
end
return {'ok', 0}
