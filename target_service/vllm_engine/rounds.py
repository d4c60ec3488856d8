"""The result of a request's part of a step: where its tokens come from, their log-probabilities, why it ends."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from outrider.errors import RequestFailed
from outrider.parameters import FinishReason
from outrider.tokens import TokenLogprobs, TokenOrigin
from target_service.engine.results import RoundResult

_FINISHES: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def round_result(
    output: Any, proposal: Sequence[int], num_logprobs: int | None, drafters: Sequence[str] = ()
) -> RoundResult:
    """Return the result of a round.

    Args:
        output: `vllm.outputs.CompletionOutput`, with the new tokens only.
        proposal: the tokens that the step verified for the request.
        num_logprobs: likeliest tokens to report at each position; None for none.
        drafters: of the proposed tokens, where their nodes name them.

    Raises:
        RequestFailed: vLLM ended the request with an error.
    """
    if output.finish_reason is not None and output.finish_reason not in _FINISHES:
        raise RequestFailed(f"vLLM ended the request: {output.finish_reason}")
    token_ids = tuple(output.token_ids)
    num_accepted = _num_accepted(token_ids, proposal)
    origins = [TokenOrigin.ACCEPTED] * num_accepted
    if num_accepted < len(token_ids):
        # vLLM outputs one token of its own behind the accepted ones, if no stop condition cut the run short.
        origins.append(TokenOrigin.RECOVERED if num_accepted < len(proposal) else TokenOrigin.BONUS)
    accepted = drafters[:num_accepted]
    named = (*accepted, *("" for _ in range(len(token_ids) - len(accepted))))
    logprobs: tuple[TokenLogprobs, ...] = ()
    if num_logprobs is not None:
        places = zip(token_ids, output.logprobs or (), strict=True)
        logprobs = tuple(_logprobs(found, token_id, num_logprobs) for token_id, found in places)
    return RoundResult(
        token_ids=token_ids,
        origins=tuple(origins),
        kept_path=tuple(range(1, num_accepted + 1)),
        logprobs=logprobs,
        num_draft_tokens=len(proposal),
        num_accepted=num_accepted,
        num_nodes=len(proposal),
        finish_reason=_FINISHES.get(output.finish_reason) if output.finish_reason else None,
        drafters=named if any(named) else (),
    )


def _num_accepted(token_ids: Sequence[int], proposal: Sequence[int]) -> int:
    """Return the number of proposed tokens among the output: a token that replaces one is always another one."""
    num = 0
    for token_id, proposed in zip(token_ids, proposal, strict=False):
        if token_id != proposed:
            break
        num += 1
    return num


def _logprobs(found: Mapping[int, Any], token_id: int, num: int) -> TokenLogprobs:
    """Return the log-probabilities at a position: vLLM's are those of the output token and of the likeliest ones."""
    own = found[token_id]
    top = sorted((item.rank, other) for other, item in found.items() if item.rank <= num)
    token_ids = tuple(other for _, other in top)
    return TokenLogprobs(own.logprob, own.rank, token_ids, tuple(found[other].logprob for other in token_ids))
