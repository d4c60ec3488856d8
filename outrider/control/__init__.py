"""What to verify, how long to wait for proposals and what passes cost: decisions from measured times, without a model.

A target that waited for every proposal would be slower than plain decoding wherever drafts are late or wrong. So each
session's policy (`policy`, whose docstring is the cost model) compares, before a round and again as nodes arrive, the
token rate of going on at once with that of waiting for one, two, ... tokens more. A new session begins with what the
target has measured in all its sessions. The verdict carries the length of main line that the target can verify; a
draft that waits for verdicts makes no more. While no proposal pays, one is requested now and then, and followed when
it arrives late, so that a session finds out at no cost when its draft becomes useful.

The seconds of a pass are a speed, which follows the machine at once, times the relative cost of a pass of that size,
learnt from passes that follow each other (`pass_times`). A time far beyond the usual counts as twice as long at most:
one stall of the machine must not end speculation for a hundred rounds.

Sessions of one target share its passes, and drafts answer at different times. A pass is delayed for sessions that are
about to be ready where fuller passes give more tokens a second (`batching_delay`).

OUTRIDER_ADAPTIVE_SPECULATION=false waits always and verifies everything; tests and `bench overhead` use it.
"""
