"""The target's engine: one thread that owns the model and its sessions, and plans and runs passes.

- **The cut** (`interface`, `commands`, `results`). The frontend of the service has streams, handles, fencing, admission
  and drains; it gives commands to an engine and takes results from it. `outrider.serving.engine_loop` runs the
  engine's thread, so another engine needs `TargetEngine`'s methods only.
- **A pass** (`scheduling`) takes every session that is ready. Rounds that decode come first, those that waited
  longest before others: rounds whose proposal is complete or whose wait is over. Prompts get a chunk each within a
  measured bound (OUTRIDER_MAX_DECODE_SLOWDOWN), a few rows at least. Two sessions that would compute the same page in
  one pass do not: the second waits for the pass and takes the page. Verdicts of a pass leave as one message for each
  stream, so their commits reach Redis as one pipeline.
- **Verification** (`speculation`, `rounds`). What is verified is chosen for all sessions of a pass together
  (`outrider.control.allocation.allocate`). Tokens of all rows are drawn together (`outrider.speculation.draws`):
  distributions, penalties, masks and keyed noise are tensors over rows, and one copy brings the tokens to the host.
- **Memory that runs out.** Where there are too few pages for a step, its proposal is left out; then the newest other
  request is preempted and recomputed later. The oldest request always advances. The target has all tokens, so nothing
  has to be sent again; KV_CACHE_MISS is for tokens that are not there.
- **Failures** (`passes`). A pass writes only behind what its sessions have cached, to pages that no other session
  holds. After a pass that raised, each cache is truncated to where it was, memory is taken anew, and the halves run,
  down to the session that fails alone, which ends with REQUEST_FAILED. Before that, a pass over one token of the
  engine's own has to succeed (`probe`): no session is blamed for a device that fails, and no process ends because of
  a session.
- **Features** for heads stand in the slot of their position's keys and values (`outrider.lm.features`) and are sent
  ahead of the verdict, in frames of 64 KiB at most. They are the one thing on these streams that can wait: where 8
  MiB wait for a slow reader they are held back until a later pass.
"""
