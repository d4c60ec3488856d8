"""The outcome of one session's round: the acceptance rule applied to the target's logits, then the stop conditions."""

from dataclasses import dataclass

import torch

from outrider.parameters import AcceptanceRule, FinishReason
from outrider.sampling import TokenHistory, target_distribution, token_logprobs
from outrider.tokens import ROOT, ProposalTree, TokenLogprobs, TokenOrigin
from outrider.verification import Outcome, verify_coupled, verify_rejection
from target_service.results import RoundResult
from target_service.sessions import Request


def decide(request: Request, logits: torch.Tensor, tree: ProposalTree, max_len: int) -> RoundResult:
    """Judges a session's proposal.

    Args:
        request: the session's request, as it was before the pass.
        logits: [1 + len(tree), V]: row 0 follows the session's last token, row n follows node n.
        tree: the proposal.
        max_len: longest session, in tokens.
    """
    base_len = len(request.resident.token_ids)
    law = _law(request, logits, tree)
    verify = verify_coupled if request.rule is AcceptanceRule.COUPLED else verify_rejection
    outcome = verify(tree, law, base_len, request.source)
    num, finish_reason = _cut(request, outcome.token_ids, max_len)
    origins = outcome.origins[:num]
    return RoundResult(
        token_ids=outcome.token_ids[:num],
        origins=origins,
        kept_path=outcome.path[: num - 1],
        logprobs=_logprobs(request, logits, outcome, num),
        num_draft_tokens=tree.max_depth,
        num_accepted=origins.count(TokenOrigin.ACCEPTED),
        num_nodes=len(tree),
        finish_reason=finish_reason,
    )


def _law(request: Request, logits: torch.Tensor, tree: ProposalTree) -> "_TargetLaw":
    tokens = request.resident.token_ids
    # Histories are long; only penalties read them.
    needs = request.parameters.needs_history
    prompt = tokens[: request.prompt_len] if needs else ()
    output = tokens[request.prompt_len :] if needs else range(request.num_output)
    return _TargetLaw(request, logits, tree, TokenHistory(prompt, output, request.parameters))


@dataclass(frozen=True, slots=True)
class _TargetLaw:
    """The target's law after a node, computed when asked for."""

    request: Request
    logits: torch.Tensor
    tree: ProposalTree
    history: TokenHistory

    def __call__(self, number: int) -> torch.Tensor:
        branch = [self.tree.node(node).token_id for node in self.tree.path(number)]
        history = self.history.extended(branch) if branch else self.history
        request = self.request
        return target_distribution(self.logits[number], request.parameters, history, request.stop_token_ids)


def _cut(request: Request, token_ids: tuple[int, ...], max_len: int) -> tuple[int, FinishReason | None]:
    """Returns how many output tokens stand, and why the request ends with the last of them."""
    length = len(request.resident.token_ids)
    room = min(request.parameters.max_tokens - request.num_output, max_len - length)
    for num, token_id in enumerate(token_ids[:room], start=1):
        if token_id in request.stop_token_ids:
            return num, FinishReason.STOP
    if len(token_ids) >= room:
        return room, FinishReason.LENGTH
    # Beyond the window nothing may be output; the rest is decided again once the window moves.
    return min(len(token_ids), request.window_end - length), None


def _logprobs(request: Request, logits: torch.Tensor, outcome: Outcome, num: int) -> tuple[TokenLogprobs, ...]:
    num_top = request.parameters.logprobs
    if num_top is None:
        return ()
    rows = (ROOT, *outcome.path)
    pairs = zip(rows[:num], outcome.token_ids[:num], strict=True)
    return tuple(token_logprobs(logits[row], token_id, num_top) for row, token_id in pairs)
