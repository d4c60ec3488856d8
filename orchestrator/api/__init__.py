"""The service that clients call: checks of requests, tenants and their quotas, admission, leases.

**Tenants.** A bearer token is hashed and compared in constant time with every known one; it names the tenant. Keys in
Redis and session names at workers are made of a hash of tenant and session_id, so that no id injects a key or reaches
another tenant's session; salts of shared KV pages derive from the tenant alone. Scripts in Redis count limits:
streams by leases that are renewed every twenty seconds, sessions by their TTL, output tokens by the minute. A request
is admitted or refused when it begins; what runs is not stopped. Every method checks the token before it looks at ids.

**Prompts** are measured before anything is done with them (`prompts`): a text has at most the session's room times
the longest token of the vocabulary, a chat at most 2,048 messages; what has more than 8 characters for each token of
room is counted piece by piece and refused at twice the room. Rendering and encoding run in threads: two
for prompts of up to 32,768 characters, one for longer ones, since 4 MB take 4 s and 0.6 GB to encode.
"""
