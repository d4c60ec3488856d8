"""Run a causal language model for many sessions at once: loading, KV cache, attention, one forward pass.

The target's engine and the drafters that have a model use it (`LanguageModel` in `model` is the interface).

- **Pages** (`pages`, `kv_storage`). All sessions of a process share one pool of pages of 32 positions, bounded by
  OUTRIDER_KV_BUDGET_BYTES. A full page is published under a SHA-256 chain over model, numerics, salt and all tokens
  up to its end; a session that is about to compute these tokens takes the page instead (prefix caching). The salt
  derives from the tenant, so tenants share nothing. A shared page is copied before it is written to. An idle session
  holds no pages: they stay findable until their memory is needed, least recently used first.
- **Token trees** (`kv_cache`). The main line of a proposal is written behind the span as if it were committed; every
  other branch has a page table of its own that shares the pages before the branching. In every table a token stands
  at its position, so masks are by position alone and accepting a branch means taking over its table.
- **Rows.** The rows of all sessions are packed without padding, but for the sizes of `ModelInfo.padded_sizes`: a
  multiple of 4, or an even number where all weights are packed (see `attention`). On a GPU a pass has parts of 128
  rows each (`gpu_passes`).
- **Memory.** A step reserves its pages before the pass. KV memory uses 2 MiB pages of the system where it has them:
  with pages of 4 KiB, 16 prompt rows at position 1,000 beside 4 sessions took 42 ms instead of 33. The system clears
  the next ones before a pass writes to them (`prefault`).
- **Compiled layers** (`compilation`, `compiled_code`). Where there is a C++ compiler, PyTorch exports up to five layers
  as one function of all their tensors and compiles it; all groups that are alike and all numbers of rows share that
  code, which is kept in the user's cache directory.
- **Attention** (`attention`) on a CPU is a native operator over the pages, which is built once where there is a C++
  compiler; else plain operations over blocks of 256 positions. On a GPU it is a Triton kernel.
- **Linear layers** in bfloat16 on a CPU are packed once (`packed_linear`) for the native product (`outrider.native`),
  which reads nearly all weights of a model in 12 bits, without loss; else for oneDNN's.
- **Ranks** (`ranks`, `pass_plan`). `torchrun` starts several processes for one target, and transformers' plan splits
  the weights. The first rank serves and plans each pass; the others receive the plan, a few hundred integers, and run
  it on their share. Page numbers are the same on all ranks, so only the first keeps books. A rank that fails ends
  all. Split weights are neither packed nor compiled.
- **Quantized weights** are those of transformers and its quantizers. The fingerprint covers them; output is exact
  relative to them.

A model is refused at the start where its state cannot be rolled back: see `attention` for what is probed.
"""

import logging

# transformers imports torchao if it is installed, and torchao logs at every start the GPU code that it cannot load.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
