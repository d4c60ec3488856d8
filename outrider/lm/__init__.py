"""Running a causal language model: loading, KV cache, attention, one forward pass over many sessions."""
