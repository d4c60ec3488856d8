"""The proposer of vLLM's workers: it proposes nothing, since proposals come to the scheduler."""

from collections.abc import Sequence


class NoProposals:
    """A `custom_class` of vLLM's speculative configuration, without which its workers verify no proposals."""

    def __init__(self, vllm_config: object) -> None:
        """Take vLLM's configuration, as vLLM requires, and read nothing of it."""

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: object, **kwargs: object) -> list[list[int]]:
        """Return no tokens for each request."""
        return [[] for _ in sampled_token_ids]
