"""Rounds of the target's engine, for proofs over `decide_all` itself: logits in, results out."""

from collections.abc import Callable, Collection, Sequence
from typing import cast

from torch import Tensor

from outrider.lm.model import KVCache
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.speculation.randomness import KeyedSource
from outrider.speculation.verification import DecisionSource
from outrider.tokens import ProposalTree
from target_service.engine.commands import Handle
from target_service.engine.request import Request
from target_service.engine.results import RoundResult
from target_service.engine.rounds import Round, decide_all
from target_service.engine.sessions import Resident
from target_service.engine.speculation import Speculation

MAX_LEN = 200

Judge = Callable[[Sequence[Round], Tensor, int], list[RoundResult]]
"""`decide_all`, or a wrong rule in its place."""


def request_of(
    token_ids: Sequence[int],
    parameters: SamplingParameters,
    rule: AcceptanceRule = AcceptanceRule.COUPLED,
    *,
    prompt_len: int = 0,
    stop_token_ids: Collection[int] = (),
    window_end: int = MAX_LEN,
    source: DecisionSource | None = None,
) -> Request:
    """Return a request on a session of these tokens; its source is that of the parameters' seed if none is given."""
    # Deciding a round uses neither the stream, nor the cache, nor the speculation.
    return Request(
        number=1,
        handle=cast(Handle, None),
        resident=Resident("", cast(KVCache, None), list(token_ids)),
        fencing_token=1,
        parameters=parameters,
        rule=rule,
        prompt_len=prompt_len,
        stop_token_ids=frozenset(stop_token_ids),
        start_len=prompt_len,
        window_end=window_end,
        source=cast(KeyedSource, source or KeyedSource(parameters.seed or 0)),
        speculation=cast(Speculation, None),
    )


def judge(request: Request, logits: Tensor, tree: ProposalTree, judges: Judge = decide_all) -> RoundResult:
    """Decide one session's round; its logits are [1 + len(tree), V]."""
    return judges([Round(request, 0, tree)], logits, MAX_LEN)[0]
