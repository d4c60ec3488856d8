"""Drafters: lookups in what was said (`ngram`, `suffix`), a small model (`model`), heads over the target's features.

All drafters with a model or a head grow one kind of token tree (`tree`), best first. A request's sizes are
`num_speculative_tokens` (tokens that a round verifies along one path), `max_nodes` (live nodes of a proposal; 0
leaves it to the drafter) and `lookahead` (nodes that may be held ahead of verdicts; with 0 the tree waits for each
verdict). A chain is a tree of one branch. MAX_PROPOSAL_NODES bounds what a worker holds of one proposal.

**Order.** A node is worth the product, along its path, of how often the target continues with the draft's first,
second, ... choice (`node_values`), each weighed by the draft's probability relative to the mean for that rank. Rates
alone do not show which alternatives are good; probabilities alone are as wrong as the draft is over- or
underconfident. Nodes carry their probabilities, and the target orders those that it may verify in the same way.
Under `coupled` a probability is that of winning under the session's own noise. Under `rejection` nodes carry none: a
sampled token becomes a node as soon as its parent has been run, whatever it is, and neither order nor admission
depends on its value: `tests/exactness/test_drafting.py` enumerates generations with these trees, and fails for one
that is ordered by its samples.

**Two in one.** `combined` joins a model's nodes and those that `suffix` finds into one tree, whose nodes name their
drafters, and does without the model in rounds where what was found is worth more (`combined_worth`).

**Steps.** One pass runs nodes of all sessions: of a chain its end, of a head's tree all of a depth that may end among
the best (12 at most), of a tree of `model` what pays for its time (`step_budget`). Each branch of `model` has a KV
cache of its own that shares the pages before the branching (copy on write); when the text goes on along a branch,
that cache becomes the session's. Committed text takes memory first, then main lines, then branches.

**Features.** A head reads what some layers of the target take in. It states in GetInfo which layers, how wide, and
for which target it was made. Features may come before the tokens that they belong to; a drafter that lacks some
reports the position from which on, and how many frames it has received, so that nothing on its way is sent twice.
After three losses without a proposal between them the draft is given up for the request, which goes on by plain
decoding.
"""
