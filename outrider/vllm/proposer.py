"""The proposer of vLLM's workers: it proposes nothing, since proposals come to the scheduler."""

from collections.abc import Sequence

from outrider.vllm.expansion import repair_expansion


class NoProposals:
    """A `custom_class` of vLLM's speculative configuration, without which its workers verify no proposals."""

    def __init__(self, vllm_config: object) -> None:
        """Check what verifying proposals needs, in each process that samples; the configuration is not read."""
        repair_expansion()

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: object, **kwargs: object) -> list[list[int]]:
        """Return no tokens for each request."""
        return [[] for _ in sampled_token_ids]
