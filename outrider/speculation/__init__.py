"""The arithmetic of speculative decoding: proposal trees, acceptance rules, sampling and its randomness."""
