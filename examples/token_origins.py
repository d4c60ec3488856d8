"""Shows where each token comes from, and how likely the target found it.

accepted   the draft proposed it, and the target agreed
recovered  the draft proposed another one; this one is the target's
bonus      nothing was proposed for this place; the target added it in the same pass
"""

import math
import sys
from collections import Counter

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
COLORS = {"accepted": "\033[32m", "recovered": "\033[33m", "bonus": "\033[36m"}
PLAIN = "\033[0m"

client = OpenAI(base_url=f"{url}/v1", api_key="-")
stream = client.completions.create(
    model=client.models.list().data[0].id,
    prompt="Once upon a time",
    max_tokens=40,
    seed=7,
    logprobs=1,
    stream=True,
    # What OpenAI's API does not have goes here: each part of the stream reports the origins of its tokens.
    extra_body={"speculation": {"report": True}},
)

counts: Counter[str] = Counter()
print(f"{'token':<14} {'origin':<10} probability")
for chunk in stream:
    # The last part has no tokens; notices, such as a target that was replaced, have no origins.
    origins = (chunk.model_extra or {}).get("speculation", {}).get("origins", [])
    for choice in chunk.choices:
        if not choice.logprobs:
            continue
        tokens, logprobs = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
        for token, logprob, origin in zip(tokens, logprobs, origins, strict=True):
            # After a failover the origin of some tokens is not known.
            name = origin or "unknown"
            counts[name] += 1
            print(f"{COLORS.get(name, '')}{token!r:<14} {name:<10} {math.exp(logprob):.3f}{PLAIN}")

print(", ".join(f"{number} {name}" for name, number in counts.most_common()))
