-- Writes a session again whose record or log the server has lost, for its live owner, which holds the committed tokens.
-- KEYS[1] session hash  KEYS[2] token log  KEYS[3] mark of a deleted session
-- ARGV: 1 fencing token, 2 position of the first token, 3 tokens up to the committed length (4 bytes each, little endian),
--       4 lease in microseconds, 5 TTL in milliseconds, 6 ... fields of the record and their values
-- Returns 'ok', 'fenced', 'deleted', 'data_loss'.
if redis.call('EXISTS', KEYS[3]) == 1 then return 'deleted' end
local known = redis.call('HMGET', KEYS[1], 'fencing_token', 'state')
if redis.call('EXISTS', KEYS[1]) == 1 then
  local token = count(known[1])
  -- Without a fencing token, a newer lease cannot be ruled out.
  if not token then return 'data_loss' end
  if token > tonumber(ARGV[1]) then return 'fenced' end
  if token == tonumber(ARGV[1]) and known[2] == 'finished' then return 'fenced' end
end
local first, length, missing = 4 * tonumber(ARGV[2]), redis.call('STRLEN', KEYS[2]), #ARGV[3]
if length < first or length > first + missing then return 'data_loss' end
-- The part that is left must equal the committed tokens.
if length > first and redis.call('GETRANGE', KEYS[2], first, -1) ~= string.sub(ARGV[3], 1, length - first) then
  return 'data_loss'
end
if missing > 0 then redis.call('SETRANGE', KEYS[2], first, ARGV[3]) end
local clock = redis.call('TIME')
local deadline = tonumber(clock[1]) * 1000000 + tonumber(clock[2]) + tonumber(ARGV[4])
redis.call('HSET', KEYS[1], 'fencing_token', ARGV[1], 'deadline', string.format('%.0f', deadline), 'state', 'running',
  'finish_reason', '', 'committed_len', (first + missing) / 4, unpack(ARGV, 6))
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return 'ok'
