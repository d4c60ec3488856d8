"""Scheduling of passes: which sessions take part, with which rows, and which are preempted for their memory."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.control.allocation import allocate
from outrider.control.pass_times import PassTimes
from outrider.lm.model import SessionStep
from outrider.tokens import ProposalTree, TokenSpan
from target_service.engine.batch_delay import BatchDelay
from target_service.engine.constraints import Constraints, Offered, with_forced
from target_service.engine.pass_budget import PassBudget
from target_service.engine.request import Request
from target_service.engine.request_constraint import RoundMasks

_NO_TREE: Final = ProposalTree()
_MIN_ROWS: Final = 4


@dataclass(slots=True)
class Share:
    """One request's part of a pass.

    Attributes:
        request: the request.
        step: its rows; their memory is reserved.
        tree: the proposal to verify; empty where there is none, or no room for it.
        wait_s: seconds that the round waited for it.
        queue_s: seconds that it was ready before the pass.
        is_prefill: whether these are tokens of a prompt or a replay, more than the one that each round adds.
        masks: of its request's constraint, after the session's tokens and after each node; None without one.
    """

    request: Request
    step: SessionStep
    tree: ProposalTree = field(default_factory=ProposalTree)
    wait_s: float = 0.0
    queue_s: float = 0.0
    is_prefill: bool = False
    masks: RoundMasks | None = None

    @property
    def num_recomputed(self) -> int:
        """Rows of output tokens that have been run before, one by one or as a proposal; the last one has not been."""
        if not self.is_prefill:
            return 0
        end = min(self.step.span.end, len(self.request.resident.token_ids) - 1)
        return max(0, end - max(self.step.span.start, self.request.prompt_len))


MAX_PASS_ROWS: Final = 1024
"""Rows of one pass, over all sessions: far more than a GPU or CPU needs to be bound by arithmetic. How long prompts may
hold up sessions that decode is for `PassBudget` to say."""
PREFILL_CHUNK_LEN: Final = 512
"""Prompt tokens of a session in one pass: half of its rows, so that two prompts advance together."""
_MOST_MIXED: Final = 16
"""Passes with prompts that follow each other while sessions decode, at most."""


class Scheduler:
    """Fills passes. Sessions that decode come first, those that waited longest before others; then prompts.

    Prompts get what the budget leaves, so that they delay no session for long; the one that waited longest gets a few
    rows at least. Memory is taken when a share is made. Where too little is left, the newest request that holds any
    is preempted and recomputed from its tokens later: the oldest always advances, so all do in their turn.

    Args:
        max_rows: rows of a pass, at most.
        prefill_chunk_len: prompt tokens of a session in one pass, at most.
        budget: bounds the rows of prompts.
        times: of the model's passes; they decide how many nodes are verified, and the batching delay. Without any, all
            nodes are verified, and no pass is delayed.
        constraints: of the requests.

    Attributes:
        num_preemptions: requests that were preempted.
    """

    def __init__(
        self, max_rows: int, prefill_chunk_len: int, budget: PassBudget, times: PassTimes, constraints: Constraints
    ) -> None:
        self._max_rows = max_rows
        self._constraints = constraints
        self._prefill_chunk_len = prefill_chunk_len
        self._times = times
        self._budget = budget
        self.num_preemptions = 0
        self._delay = BatchDelay(times)
        self._num_mixed = 0

    def shares(self, requests: Collection[Request], now: float) -> list[Share]:
        """Return the shares of the next pass; none where no session is ready at the time `now` (monotonic, seconds).

        None either during a batching delay; see `outrider.control.batching_delay`.
        """
        runnable = sorted((item for item in requests if item.can_run), key=lambda item: item.round_started)
        shares: list[Share] = []
        num_rows = 0
        decoding = [item for item in runnable if item.num_uncached == 1]
        rounds = [item for item in decoding if item.is_ready(now)][: self._max_rows]
        waits = len(decoding) == len(runnable) and len(rounds) < self._max_rows
        if waits and self._delay.holds(decoding, rounds, now):
            return []
        self._delay.end()
        prompts = [item for item in runnable if item.num_uncached > 1]
        offered = [Offered(request, tree) for request, tree in zip(rounds, self._trees(rounds, now), strict=True)]
        masked = self._constraints.masked([*offered, *(Offered(request, _NO_TREE) for request in prompts)])
        for request, found in zip(rounds, masked[: len(rounds)], strict=True):
            # Its memory may have been taken for one before it.
            if request.num_uncached == 1 and found is not None:
                tree, masks = found
                num_rows += self._add(self._round(request, tree, now, requests, shares, masks), shares)
        if not self._is_measured_alone(num_rows):
            # The constraint of one may have to be compiled anew.
            self._add_prefill([item for item in prompts if item.can_run], num_rows, requests, shares)
        self._num_mixed = self._num_mixed + 1 if any(share.is_prefill for share in shares) else 0
        return shares

    def next_time(self, requests: Iterable[Request], now: float) -> float | None:
        """Return when there may be shares if no command comes before; None for never.

        Args:
            requests: of which none takes part in a pass now.
            now: monotonic time.
        """
        return self._delay.next_time((item for item in requests if item.can_run), now)

    def _is_measured_alone(self, num_rows: int) -> bool:
        """Return whether a pass shows what its rows that decode take without prompts, which may add a share of it."""
        return num_rows > 0 and (not self._times.known or self._num_mixed >= _MOST_MIXED)

    def _add_prefill(
        self, prompts: Collection[Request], num_rows: int, requests: Collection[Request], shares: list[Share]
    ) -> None:
        allowance_s = self._budget.allowance_s(num_rows, len(prompts))
        room = max(_MIN_ROWS, self._max_rows - num_rows)
        pages: set[bytes] = set()
        is_first, most = True, 0
        for request in prompts:
            resident = request.resident
            resident.cache.adopt(resident.token_ids)
            start, wanted = resident.cache.cached_len, min(request.num_uncached, self._prefill_chunk_len, room)
            num = self._budget.rows_within(allowance_s, start, wanted)
            # One prompt always advances, however little the others should be held up.
            num = max(num, min(wanted, _MIN_ROWS)) if is_first else num
            if num > 0 and self._add(self._prefill(request, num, pages, requests, shares), shares):
                allowance_s = self._budget.remaining_s(allowance_s, num, start)
                room -= num
                is_first, most = False, max(most, num)
        if not is_first and num_rows:
            self._budget.observe(most)

    def _add(self, share: Share | None, shares: list[Share]) -> int:
        if share is None:
            return 0
        shares.append(share)
        return share.step.num_rows

    def _trees(self, rounds: Sequence[Request], now: float) -> list[ProposalTree]:
        """Return the tree that each round verifies, chosen together: they share the pass."""
        offers = [request.speculation.offer(request.room) for request in rounds]
        # Nodes that must be verified come before those that may be, as far as there are rows; tokens that a constraint
        # forces come before both.
        room = self._max_rows - len(rounds)
        forced = []
        for request in rounds:
            forced.append(request.forced(room))
            room -= len(forced[-1])
            request.speculation.num_forced = len(forced[-1])
        musts = []
        for must, _ in offers:
            musts.append(must[:room])
            room -= len(musts[-1])
        num_rows = self._max_rows - room
        wait_s = sum(request.speculation.waited_s(now) for request in rounds) / max(1, len(rounds))
        mays = allocate([found for _, found in offers], float(num_rows), num_rows, self._max_rows, self._times, wait_s)
        trees = [
            request.speculation.tree([*must, *may]) if must or may else _NO_TREE
            for request, must, may in zip(rounds, musts, mays, strict=True)
        ]
        return list(map(with_forced, trees, forced))

    def _round(
        self,
        request: Request,
        tree: ProposalTree,
        now: float,
        requests: Collection[Request],
        shares: list[Share],
        masks: RoundMasks | None,
    ) -> Share | None:
        step = self._reserved(request, request.num_uncached, tree, requests, shares)
        wait_s = request.speculation.waited_s(now)
        queue_s = max(0.0, now - request.round_started - wait_s)
        return None if step is None else Share(request, step, step.tree, wait_s, queue_s, masks=masks)

    def _prefill(
        self, request: Request, num: int, pages: set[bytes], requests: Collection[Request], shares: list[Share]
    ) -> Share | None:
        resident = request.resident
        page = resident.cache.next_page(resident.token_ids)
        if page in pages:
            # Another session computes this page in this very pass; afterwards it can be shared.
            return None
        step = self._reserved(request, num, _NO_TREE, requests, shares)
        if step is None:
            return None
        if page is not None:
            pages.add(page)
        masks = None if request.constraint is None else request.constraint.base_masks
        return Share(request, step, step.tree, is_prefill=True, masks=masks)

    def _reserved(
        self,
        request: Request,
        num_tokens: int,
        tree: ProposalTree,
        requests: Collection[Request],
        shares: list[Share],
    ) -> SessionStep | None:
        """Return the step with its memory taken; without its tree, or None, where there is too little."""
        cache, token_ids = request.resident.cache, request.resident.token_ids
        start = cache.cached_len
        span = TokenSpan(start, tuple(token_ids[start : start + num_tokens]))
        while not cache.reserve(span, tree):
            if tree:
                tree = _NO_TREE
            elif not self._preempt(request, requests, shares):
                return None
        return SessionStep(cache, span, tree, wants_logits=span.end == len(token_ids))

    def _preempt(self, request: Request, requests: Iterable[Request], shares: list[Share]) -> bool:
        """Release the memory of the newest request, if it is newer than this one and not in the pass."""
        in_pass = {id(share.request) for share in shares}
        newer = (item for item in requests if item.number > request.number and id(item) not in in_pass)
        holding = (item for item in newer if item.resident.cache.num_bytes)
        victim = max(holding, key=lambda item: item.number, default=None)
        if victim is None:
            return False
        victim.resident.cache.release()
        self.num_preemptions += 1
        return True


def prepared_again(shares: Sequence[Share]) -> list[Share]:
    """Return the shares of a pass that failed, to be run once more, with their memory taken anew.

    A pass writes after the positions that a session has cached, and only to pages that no other session holds. So the
    positions cached before it are still valid, whatever it wrote before it failed; but for a page that it was to copy
    first, which is run again. A share for which too little memory is left is left out: its session takes part in a
    later pass.
    """
    for share in shares:
        share.step.cache.truncate(share.step.span.start)
    return [again for share in shares if (again := _prepared_again(share)) is not None]


def _prepared_again(share: Share) -> Share | None:
    step, token_ids = share.step, share.request.resident.token_ids
    start = step.cache.cached_len
    span = TokenSpan(start, tuple(token_ids[start : step.span.end]))
    for tree in (share.tree, _NO_TREE):
        if step.cache.reserve(span, tree):
            is_prefill = share.is_prefill or start < step.span.start
            return replace(share, step=replace(step, span=span, tree=tree), tree=tree, is_prefill=is_prefill)
    return None
