"""The outcome of sessions' rounds: the acceptance rule applied to the target's logits, then the stop conditions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from outrider.errors import ConstraintFailed
from outrider.parameters import AcceptanceRule, FinishReason
from outrider.speculation.draws import Draw, target_draws
from outrider.speculation.logprobs import token_logprobs
from outrider.speculation.sampling import NoPossibleToken, SamplingMetadata, TokenHistory, target_distribution
from outrider.speculation.verification import Outcome, follow_draws, verify_rejection
from outrider.tokens import ROOT, ProposalTree, TokenLogprobs, TokenOrigin
from target_service.engine.request import Request
from target_service.engine.request_constraint import RoundMasks
from target_service.engine.results import RoundResult


class Round(NamedTuple):
    """One session's part of a pass, to be judged.

    Attributes:
        request: the session's request, as it was before the pass.
        first_row: of the pass's logits: the row after the session's last token; row `first_row` + n follows node n.
        tree: the proposal.
        masks: of the request's constraint; None without one.
    """

    request: Request
    first_row: int
    tree: ProposalTree
    masks: RoundMasks | None = None

    def metadata(self, number: int, history: TokenHistory) -> SamplingMetadata:
        """Return the inputs of the distribution after a node."""
        request = self.request
        allowed, must_end = (None, False) if self.masks is None else self.masks.after(number)
        return SamplingMetadata(request.parameters, history, request.stop_token_ids, allowed, must_end)

    def check_reached(self, number: int) -> None:
        """Raise `ConstraintFailed` for a node that is part of the output where no token can follow it."""
        if self.masks is not None and number in self.masks.dead:
            raise ConstraintFailed("no token that the constraint allows can follow the output")

    def no_token(self, logits: torch.Tensor, number: int) -> Exception:
        """Return why there is no token after a node: the constraint leaves none, or the model's logits are none."""
        row = logits[self.first_row + number]
        if self.masks is not None and bool(row.max().isfinite()) and not bool(row.isnan().any()):
            return ConstraintFailed("the model finds no token possible that the constraint allows")
        return NoPossibleToken("the largest logit of a row is not finite, must be")


def decide_all(rounds: Sequence[Round], logits: torch.Tensor, max_len: int) -> list[RoundResult]:
    """Judge the proposals of all sessions of a pass; each result is the same whichever sessions are beside it.

    Args:
        rounds: of different sessions.
        logits: [N, V], the rows of all sessions.
        max_len: longest session, in tokens.

    Raises:
        ConstraintFailed: of one of the sessions, no token that its constraint allows is possible.
        NoPossibleToken: the logits of one of the sessions are none.
    """
    outcomes = _outcomes(rounds, logits)
    cuts = [_cut(item.request, outcome.token_ids, max_len) for item, outcome in zip(rounds, outcomes, strict=True)]
    logprobs = _logprobs(rounds, outcomes, [num for num, _ in cuts], logits)
    return [_result(*parts) for parts in zip(rounds, outcomes, cuts, logprobs, strict=True)]


def _result(
    item: Round, outcome: Outcome, cut: tuple[int, FinishReason | None], logprobs: tuple[TokenLogprobs, ...]
) -> RoundResult:
    num, finish_reason = cut
    origins = outcome.origins[:num]
    return RoundResult(
        token_ids=outcome.token_ids[:num],
        origins=origins,
        kept_path=outcome.path[: num - 1],
        logprobs=logprobs,
        num_draft_tokens=item.tree.max_depth,
        num_accepted=origins.count(TokenOrigin.ACCEPTED),
        num_nodes=len(item.tree),
        finish_reason=finish_reason,
        drafters=_drafters(outcome.path, item.tree, num),
    )


def _drafters(path: Sequence[int], tree: ProposalTree, num: int) -> tuple[str, ...]:
    """Return the drafters of the first `num` tokens of a path and the token after it; none where no node names one."""
    drafters = [tree.node(number).drafter for number in path[:num]]
    return (*drafters, *("" for _ in range(num - len(drafters)))) if any(drafters) else ()


def _outcomes(rounds: Sequence[Round], logits: torch.Tensor) -> list[Outcome]:
    coupled = [item for item in rounds if item.request.rule is AcceptanceRule.COUPLED]
    draws = iter(target_draws(logits, [draw for item in coupled for draw in _draws(item)]))
    return [
        _follow(item, draws, logits) if item.request.rule is AcceptanceRule.COUPLED else _reject(item, logits)
        for item in rounds
    ]


def _draws(item: Round) -> Iterator[Draw]:
    """Yield the draws of the target's own tokens, after the base and after each node."""
    key, base_len = item.request.source.key, len(item.request.resident.token_ids)
    for number, history in enumerate(_histories(item)):
        terms = item.metadata(number, history)
        yield Draw(item.first_row + number, terms, key, base_len + item.tree.depth(number))


def _follow(item: Round, draws: Iterator[int | None], logits: torch.Tensor) -> Outcome:
    """Verify a tree by the next 1 + len(tree) draws; what is not reached may have none."""
    own = [next(draws) for _ in range(1 + len(item.tree))]

    def draw(number: int) -> int:
        item.check_reached(number)
        token_id = own[number]
        if token_id is None:
            raise item.no_token(logits, number)
        return token_id

    return follow_draws(item.tree, draw)


def _reject(item: Round, logits: torch.Tensor) -> Outcome:
    distribution = _TargetDistribution(item, logits, _histories(item))
    return verify_rejection(item.tree, distribution, len(item.request.resident.token_ids), item.request.source)


def _histories(item: Round) -> list[TokenHistory]:
    """Return the tokens before the one after the base, and before those after each node."""
    request, tokens = item.request, item.request.resident.token_ids
    # Histories are long, and only penalties read them.
    needs = request.parameters.needs_history
    prompt = tokens[: request.prompt_len] if needs else ()
    output = tokens[request.prompt_len :] if needs else range(request.num_output)
    histories = [TokenHistory(prompt, output, request.parameters)]
    for node in item.tree.nodes:
        histories.append(histories[node.parent].extended([node.token_id]))
    return histories


@dataclass(frozen=True, slots=True)
class _TargetDistribution:
    """The target's distribution after a node, computed on each call."""

    item: Round
    logits: torch.Tensor
    histories: list[TokenHistory]

    def __call__(self, number: int) -> torch.Tensor:
        self.item.check_reached(number)
        row = self.logits[self.item.first_row + number]
        try:
            return target_distribution(row, self.item.metadata(number, self.histories[number]))
        except NoPossibleToken as error:
            raise self.item.no_token(self.logits, number) from error


def _cut(request: Request, token_ids: tuple[int, ...], max_len: int) -> tuple[int, FinishReason | None]:
    """Return how many output tokens are kept, and why the request ends with the last of them."""
    length = len(request.resident.token_ids)
    room = min(request.parameters.max_tokens - request.num_output, max_len - length)
    for num, token_id in enumerate(token_ids[:room], start=1):
        if token_id in request.stop_token_ids:
            return num, FinishReason.STOP
    if len(token_ids) >= room:
        return room, FinishReason.LENGTH
    # No output beyond the window; these tokens are decided again once it moves.
    return min(len(token_ids), request.window_end - length), None


def _logprobs(
    rounds: Sequence[Round], outcomes: Sequence[Outcome], nums: Sequence[int], logits: torch.Tensor
) -> list[tuple[TokenLogprobs, ...]]:
    """Return the log-probabilities of the first `nums` output tokens of each round that requests them."""
    requested = [item.request.parameters.logprobs is not None for item in rounds]
    places = [
        (item.first_row + row, token_id, item.request.parameters.logprobs or 0)
        for item, outcome, num, is_requested in zip(rounds, outcomes, nums, requested, strict=True)
        for row, token_id in list(zip((ROOT, *outcome.path), outcome.token_ids, strict=True))[: num * is_requested]
    ]
    results = iter(_logprobs_at(places, logits))
    nums_given = [num * is_requested for num, is_requested in zip(nums, requested, strict=True)]
    return [tuple(next(results) for _ in range(num)) for num in nums_given]


def _logprobs_at(places: Sequence[tuple[int, int, int]], logits: torch.Tensor) -> list[TokenLogprobs]:
    if not places:
        return []
    rows, token_ids, nums_top = zip(*places, strict=True)
    return token_logprobs(logits[torch.tensor(rows, device=logits.device)], token_ids, nums_top)
