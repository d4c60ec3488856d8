-- Cancels a running request: at once where nobody holds a lease, else its owner ends it with its next commit.
-- KEYS[1] session hash  KEYS[2] token log  KEYS[3] mark of a deleted session
-- ARGV: 1 tenant, 2 request_id or '' for whichever runs
-- Returns 'not_found', 'no_request', 'idle' (nothing was running), 'cancelled'.
local known = redis.call('HMGET', KEYS[1], 'tenant', 'request_id', 'state', 'deadline')
if known[1] == false or known[1] ~= ARGV[1] then return 'not_found' end
if ARGV[2] ~= '' and known[2] ~= ARGV[2] then return 'no_request' end
if known[3] ~= 'running' then return 'idle' end
local clock = redis.call('TIME')
if tonumber(known[4]) > tonumber(clock[1]) * 1000000 + tonumber(clock[2]) then
  redis.call('HSET', KEYS[1], 'cancelled', '1')
else
  redis.call('HSET', KEYS[1], 'cancelled', '1', 'state', 'finished', 'finish_reason', 'cancelled')
end
return 'cancelled'
