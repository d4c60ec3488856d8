"""The arithmetic of speculative decoding: proposal trees, acceptance rules, sampling and its randomness.

A proposal is a token tree that outlives rounds (`proposal_tree`). It is rooted at a committed length; its nodes keep
the numbers under which they were sent for as long as the text goes on along it. Draft and target hold the same tree,
each as far as it has received it: a verdict moves the root down to the target's last token and drops what can no
longer happen; where that token is not in the tree, the draft roots a new one. Late nodes are followed along the
tokens that the target output meanwhile, nodes below dropped ones are ignored, and a part with node number 1 replaces
the tree. Every part carries the session's length that the draft had (`known_len`), by which the target measures the
round trip.

`verification` decides what is accepted: under `coupled` the target's own draws, with noise keyed by seed and
position, so that the output equals plain decoding token by token; under `rejection` by Leviathan et al. (2023),
Algorithm 1, which keeps the distribution. Under `rejection` the first child of a node is sampled as soon as the node
has been run, with noise keyed by the rooted length, the position and the guess that its chain continues from; the
line of sampled nodes is verified as far as it has come, never by worth, since whether a drafted node is verified must
not depend on what its token led to. A round proposes at most one token less than it may output, because the target
adds one of its own: no node is judged twice. `tests/exactness` enumerates whole generations with the production code.
"""
