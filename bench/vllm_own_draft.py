"""A draft within vLLM's process: proposes what a remote draft would, and takes as long as one for each token."""

import json
import os
import time
from collections.abc import Sequence
from typing import Any, Final

from outrider.vllm.proposer import NoProposals

TABLE_VARIABLE: Final = "OUTRIDER_BENCH_OWN_DRAFT"


class OwnDraft(NoProposals):
    """A `custom_class` that looks up the next token after each, and sleeps as a small model would compute.

    The variable names a JSON file with `next_token`, the likeliest token after each one, and `step_s`.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        with open(os.environ[TABLE_VARIABLE]) as file:
            table = json.load(file)
        self._next: Sequence[int] = table["next_token"]
        self._step_s = float(table["step_s"])
        self._num = vllm_config.speculative_config.num_speculative_tokens

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: object, **kwargs: object) -> list[list[int]]:
        """Return a chain after each request's last token; all requests share a step's time, as in a batch."""
        if any(sampled_token_ids):
            time.sleep(self._num * self._step_s)
        return [self._chain(tokens[-1]) if tokens else [] for tokens in sampled_token_ids]

    def _chain(self, token_id: int) -> list[int]:
        chain = []
        for _ in range(self._num):
            token_id = self._next[token_id]
            chain.append(token_id)
        return chain
