-- Commits output tokens, renews the lease, and ends the request where a reason is given.
-- KEYS[1] session hash  KEYS[2] token log  KEYS[3] mark of a deleted session
-- ARGV: 1 fencing token, 2 expected length, 3 tokens (4 bytes each, little endian), 4 lease in microseconds,
--       5 TTL in milliseconds, 6 finish reason or '', 7 target replica that is warm, or ''
-- Returns {outcome, committed length, '1' when the request was cancelled}; outcome: 'ok', 'fenced', 'gone',
-- 'deleted', 'data_loss'.
local known = redis.call('HMGET', KEYS[1], 'fencing_token', 'committed_len', 'cancelled', 'state', 'finish_reason')
if redis.call('EXISTS', KEYS[1]) == 0 then return {redis.call('EXISTS', KEYS[3]) == 1 and 'deleted' or 'gone', 0, '0'} end
local token, length, expected, num = count(known[1]), count(known[2]), tonumber(ARGV[2]), #ARGV[3] / 4
if not token or not length or not (known[4] == 'running' or known[4] == 'finished') then return {'data_loss', 0, '0'} end
if token > tonumber(ARGV[1]) then return {'fenced', length, '0'} end
-- A failover has lost the writes that granted this lease's fencing token.
if token < tonumber(ARGV[1]) then return {'data_loss', length, '0'} end
if redis.call('STRLEN', KEYS[2]) ~= 4 * length then return {'data_loss', length, '0'} end
if known[4] == 'finished' then
  -- Ended by this lease, or cancelled after the lease had expired: the client may have seen the end, so nothing may follow.
  -- A repetition whose first reply was lost changes nothing.
  local same_end = ARGV[6] == '' or ARGV[6] == known[5]
  local same_log = num == 0 and length == expected or num > 0 and length == expected + num
    and redis.call('GETRANGE', KEYS[2], 4 * expected, 4 * length - 1) == ARGV[3]
  return {same_end and same_log and 'ok' or 'fenced', length, known[3]}
end
if length == expected then
  if num > 0 then redis.call('APPEND', KEYS[2], ARGV[3]) end
  length = length + num
elseif length ~= expected + num or redis.call('GETRANGE', KEYS[2], 4 * expected, 4 * length - 1) ~= ARGV[3] then
  -- Not even a repetition whose first reply was lost.
  return {'data_loss', length, '0'}
end
local clock = redis.call('TIME')
local deadline = tonumber(clock[1]) * 1000000 + tonumber(clock[2]) + tonumber(ARGV[4])
local fields = {'committed_len', length, 'deadline', string.format('%.0f', deadline)}
if ARGV[6] ~= '' then fields = {'committed_len', length, 'deadline', 0, 'state', 'finished', 'finish_reason', ARGV[6]} end
redis.call('HSET', KEYS[1], 'target', ARGV[7], unpack(fields))
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return {'ok', length, known[3]}
