"""KV blocks in Redis: full pages of KV cache that another target can restore instead of computing them.

A session moves to a target without its KV cache after a crash, a drain or an eviction. What is stored is what
sessions of a process share anyway: full pages under the digest that decides their bits, with their features.
Restoring publishes pages under their digests, and the session finds them as it finds those of another session.

- **Writing** follows the computation. After a pass the pages that became full are copied to a bounded queue, which a
  thread of its own writes out, several blocks in one message. What does not fit is dropped and counted.
- **Restoring** begins when all tokens of a request are here. Threads fetch the chain in parts of 2 MiB; each part is
  placed between two passes and adopted at once. The first missing block ends it; the rest is an ordinary prompt. Only
  that session waits, and no longer than computing would take.
- **Format** (`format`). A block carries a version, the digest of model, numerics and layout, its own digest, and a
  seal: HMAC-SHA-256 under the fleet's secret (OUTRIDER_KV_BLOCKS_SECRET_FILE), so that write access to Redis is not
  enough to forge a block. Without a secret the seal is a checksum, and that Redis is trusted. A block that differs in
  anything is deleted and computed. Keys and values are stored as they are held, so restored bits are computed bits.
- **Cost** (`costs`). Restoring pays where answer + bytes / rate is less than the time of computing. Both are
  measured: at the start with blocks and a prompt of no session, then with all that is restored and computed, and once
  a minute. Where restoring would be slower, nothing is written either.
- **Redis** is a second server: a cache with eviction and without persistence. After a failure the circuit is
  open for five seconds: Redis is not called. A local stack starts one where it has several targets.

`outrider bench takeover` kills the target of a stream and measures the time to the next token.
"""
