-- Cancels a running request: at once where no lease is live, else its owner ends it with its next commit.
-- KEYS[1] session hash  KEYS[2] token log  KEYS[3] mark of a deleted session
-- ARGV: 1 tenant, 2 request_id or '' for any
-- Returns 'not_found', 'no_request', 'idle' (nothing was running), 'cancelled', 'data_loss'.
local known = redis.call('HMGET', KEYS[1], 'tenant', 'request_id', 'state', 'deadline')
if redis.call('EXISTS', KEYS[1]) == 0 then return 'not_found' end
-- The key is a hash of tenant and session: a record of another tenant is damage.
local deadline = count(known[4])
if known[1] ~= ARGV[1] or not known[2] or not deadline or not (known[3] == 'running' or known[3] == 'finished') then
  return 'data_loss'
end
if ARGV[2] ~= '' and known[2] ~= ARGV[2] then return 'no_request' end
if known[3] ~= 'running' then return 'idle' end
local clock = redis.call('TIME')
if deadline > tonumber(clock[1]) * 1000000 + tonumber(clock[2]) then
  redis.call('HSET', KEYS[1], 'cancelled', '1')
else
  redis.call('HSET', KEYS[1], 'cancelled', '1', 'state', 'finished', 'finish_reason', 'cancelled')
end
return 'cancelled'
