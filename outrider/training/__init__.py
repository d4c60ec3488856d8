"""Train drafts for a target (`outrider distill`): shallow models (`layers`) and heads (`eagle3`, `medusa`).

- **Data** (`synthesis`) comes from the target itself: it writes what users might ask inside its chat template, then
  the answers, half of them greedily, half at temperature 1, on the engine that serves it. Shards carry its
  fingerprint; which prompts are held out depends on the prompt alone.
- **Teacher** (`teacher`). What the target computes of a conversation (three features, the last hidden state, the
  logarithm of the sum of all exponentials of logits: 8 H + 4 bytes a token) is computed once and kept on disk, so
  that an epoch costs the draft's own passes only.
- **Objective** (`objective`): cross entropy under the target's distribution over the draft's vocabulary, which holds
  the most frequent tokens of the answers. The weight of a depth is 0.8 of that of the depth before. Output layers are
  the target's own rows, frozen; `--trim` leaves them out of a saved head.
- **Schedule** (`schedule`). Two thirds of the steps train the first token only: such a step takes a third of the time
  of one over three depths and teaches the first as much, and the same weights make all depths, so deeper ones come at
  the end. Medusa's heads share no weights and are all trained throughout. An EAGLE-3 head begins as the target's last
  layer over the last of the three features. With both, and twice the learning rate over half the tokens a step, 36 %
  of the first tokens were right after 215,000 tokens and 27 s of training, 20 % after 73 s without.
- **Acceptance** (`acceptance`) is measured along held-out texts of the target: a token at depth k counts only where
  all before it were right, so one pass over a text gives the outcome of a round begun at any position. For answers at
  temperature 1 the noise is drawn anew given the text, which is what `coupled` compares.
- **Resuming.** A run that was killed goes on to the same curve: a step is a function of its number, the options and
  the plan, which is fixed once the first eight steps have been timed against the budget.

A folder that `layers` wrote is an ordinary checkpoint with a map of the draft's vocabulary beside it. EAGLE-3 heads
are written in SGLang's layout, and read in that one and in the one of vLLM's speculators.
"""

import outrider.lm  # noqa: F401  (before transformers: it reduces the logging of transformers' optional libraries)
