-- Renews a lease, or releases it while the request stays resumable.
-- KEYS[1] session hash  KEYS[2] token log  KEYS[3] mark of a deleted session
-- ARGV: 1 fencing token, 2 lease in microseconds (0 releases), 3 TTL in milliseconds
-- Returns {outcome, '1' when the request was cancelled}; outcome: 'ok', 'fenced', 'gone', 'deleted',
-- 'data_loss'.
local known = redis.call('HMGET', KEYS[1], 'fencing_token', 'cancelled', 'state')
if redis.call('EXISTS', KEYS[1]) == 0 then return {redis.call('EXISTS', KEYS[3]) == 1 and 'deleted' or 'gone', '0'} end
local token = count(known[1])
if not token then return {'data_loss', '0'} end
if token > tonumber(ARGV[1]) then return {'fenced', '0'} end
-- A failover has lost the writes that granted this lease's fencing token.
if token < tonumber(ARGV[1]) then return {'data_loss', '0'} end
-- A renewal that comes after the end must not keep the next request waiting for this lease.
if known[3] == 'finished' then return {'ok', known[2]} end
local deadline = 0
if tonumber(ARGV[2]) > 0 then
  local clock = redis.call('TIME')
  deadline = tonumber(clock[1]) * 1000000 + tonumber(clock[2]) + tonumber(ARGV[2])
end
redis.call('HSET', KEYS[1], 'deadline', string.format('%.0f', deadline))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return {'ok', known[2]}
