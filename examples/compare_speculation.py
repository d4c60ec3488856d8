"""Runs one request with and without speculation: the text is the same, the speed is not.

Whether drafts pay depends on the text, the model and the machine. `outrider bench speed` measures it with more care.
"""

import sys

from outrider import Client, Generation, SamplingParameters, Speculation

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50050"
PROMPT = "Repeat this list three times: one apple, two pears, three plums, four figs."
ROUNDS = 3

# With a seed the text is the same each time, although it is sampled at temperature 1.
parameters = SamplingParameters(max_tokens=96, temperature=1.0, seed=7)
speculations = {"with": Speculation(), "without": Speculation(disabled=True)}

with Client(address) as client:
    runs: dict[str, list[Generation]] = {name: [] for name in speculations}
    # In turns, so that whatever else this machine does slows both down.
    for _ in range(ROUNDS):
        for name, speculation in speculations.items():
            runs[name].append(client.complete(PROMPT, parameters, speculation=speculation))

for name, generations in runs.items():
    speeds = sorted(generation.statistics.tokens_per_second for generation in generations)
    statistics = generations[-1].statistics
    speed = f"{name} speculation: {speeds[ROUNDS // 2]:.1f} tokens/s, {statistics.num_target_passes} target passes"
    print(f"{speed}, {statistics.num_accepted_tokens} of {statistics.num_draft_tokens} drafted tokens accepted")

texts = {generation.text for generations in runs.values() for generation in generations}
print(f"the same text {2 * ROUNDS} times: {'yes' if len(texts) == 1 else 'NO'}")
