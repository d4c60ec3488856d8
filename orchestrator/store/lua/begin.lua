-- Leases a session and begins a request on it, or continues the same request.
-- KEYS[1] session hash  KEYS[2] token log  KEYS[3] mark of a deleted session
-- ARGV: 1 tenant, 2 session_id, 3 model fingerprint, 4 tokenizer fingerprint, 5 request_id, 6 request fingerprint,
--       7 owner (unique to the call, which may be repeated), 8 lease in microseconds, 9 TTL in milliseconds,
--       10 parameters, 11 seed, 12 acceptance rule,
--       13 prompt (4 bytes a token, little endian), 14 expected length or '', 15 '1' takes a live lease over,
--       16 '1' refuses a new request, 17 longest session in tokens
-- Returns {outcome, the log from the prompt on, fields and values of the hash ...}; the log is '' except for 'continued'
-- and 'finished'. Only 'new' and 'continued' lease.
local fields = {'tenant', 'model', 'tokenizer', 'request_id', 'request_fingerprint', 'state', 'deadline', 'fencing_token',
  'committed_len', 'owner', 'session_id', 'created', 'finish_reason', 'prompt_start'}

local function reply(outcome, log)
  local record = redis.call('HGETALL', KEYS[1])
  table.insert(record, 1, log or '')
  table.insert(record, 1, outcome)
  return record
end

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local known = redis.call('HMGET', KEYS[1], unpack(fields))
local exists = redis.call('EXISTS', KEYS[1]) == 1
local length, fencing_token, live, prompt_start = 0, 0, false, 0

if exists then
  for index = 1, #fields do
    if known[index] == false then return {'data_loss'} end
  end
  local is_finished = known[6] == 'finished' and known[13] ~= ''
  if not is_finished and not (known[6] == 'running' and known[13] == '') then return {'data_loss'} end
  -- The key is a hash of tenant and session: a record of another pair is damage.
  if known[1] ~= ARGV[1] or known[11] ~= ARGV[2] or not count(known[12]) then return {'data_loss'} end
  if known[2] ~= ARGV[3] or known[3] ~= ARGV[4] then return reply('other_model') end
  length, fencing_token = count(known[9]), count(known[8])
  local deadline = count(known[7])
  prompt_start = count(known[14])
  if not length or not fencing_token or not deadline or not prompt_start then return {'data_loss'} end
  if redis.call('STRLEN', KEYS[2]) ~= 4 * length then return reply('data_loss') end
  live = deadline > now
  if known[4] == ARGV[5] then
    if known[5] ~= ARGV[6] then return reply('duplicate') end
    if known[6] == 'finished' then
      redis.call('PEXPIRE', KEYS[1], ARGV[9])
      redis.call('PEXPIRE', KEYS[2], ARGV[9])
      return reply('finished', redis.call('GETRANGE', KEYS[2], 4 * prompt_start, -1))
    end
    if live and ARGV[15] ~= '1' and known[10] ~= ARGV[7] then return reply('busy') end
  elseif ARGV[16] == '1' then
    return reply('no_request')
  elseif live then
    return reply('busy')
  end
elseif ARGV[16] == '1' then
  return {'not_found'}
end

fencing_token = string.format('%.0f', math.max(fencing_token + 1, now))
local lease = {'fencing_token', fencing_token, 'owner', ARGV[7], 'deadline',
  string.format('%.0f', now + tonumber(ARGV[8]))}

if exists and known[4] == ARGV[5] then
  redis.call('HSET', KEYS[1], 'state', 'running', unpack(lease))
  redis.call('PEXPIRE', KEYS[1], ARGV[9])
  redis.call('PEXPIRE', KEYS[2], ARGV[9])
  return reply('continued', redis.call('GETRANGE', KEYS[2], 4 * prompt_start, -1))
end

if ARGV[14] ~= '' and tonumber(ARGV[14]) ~= length then return reply('other_length') end
local prompt_len = length + #ARGV[13] / 4
if prompt_len >= tonumber(ARGV[17]) then return reply('too_long') end
-- A log without its record (evicted, removed by hand) does not belong to this session. This is the first write on
-- purpose: when memory is full, Redis refuses only the first write of a script, and only one that can grow.
redis.call(exists and 'APPEND' or 'SET', KEYS[2], ARGV[13])
if not exists then
  redis.call('DEL', KEYS[3])
  redis.call('HSET', KEYS[1], 'tenant', ARGV[1], 'session_id', ARGV[2], 'model', ARGV[3], 'tokenizer', ARGV[4],
    'created', fencing_token, 'target', '')
end
redis.call('HSET', KEYS[1], 'request_id', ARGV[5], 'request_fingerprint', ARGV[6], 'parameters', ARGV[10], 'seed', ARGV[11],
  'rule', ARGV[12], 'state', 'running', 'finish_reason', '', 'cancelled', '0', 'begun', fencing_token, 'prompt_start', length,
  'prompt_len', prompt_len, 'committed_len', prompt_len, unpack(lease))
redis.call('PEXPIRE', KEYS[1], ARGV[9])
redis.call('PEXPIRE', KEYS[2], ARGV[9])
return reply('new')
