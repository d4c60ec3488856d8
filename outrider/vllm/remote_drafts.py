"""The proposal source of a vLLM server: trees from remote drafts, one for each request.

The trees grow in the drafts' thread while vLLM's step runs, and are read in vLLM's; one lock guards them all.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from outrider.control.draft_times import AnswerTimes, DraftTimes
from outrider.control.pass_times import PassTimes
from outrider.errors import InvalidArgument
from outrider.parameters import AcceptanceRule
from outrider.speculation.acceptance import AcceptanceRates
from outrider.speculation.received_tree import ReceivedTree
from outrider.tokens import ProposalPart
from outrider.vllm.draft_thread import Advance, Begin, Command, DraftThread, End
from outrider.vllm.drafted import Drafted, SourceCounts
from outrider.vllm.source import EngineRequest, Step
from outrider.vllm.step_plan import Line, best_wait_s, verified
from outrider.vllm.terms import is_draftable, open_message

_LEAST_VALUE: Final = 0.05
"""Acceptance rate of a first token below which its request is drafted for in some rounds only, to learn of a change."""
_MAX_EMPTY_ROUNDS: Final = 64
"""Rounds in a row without a token to verify, because the draft's answers come too late, after which likewise."""
_TRIAL_ROUNDS: Final = 16
_TRIAL_CYCLE: Final = 256
_MAX_SILENT_WAITS: Final = 2
"""Waits in a row in which nothing arrived, of any request, after which no step waits until something does."""
_NUM_OVERHEADS: Final = 8192


class RemoteDrafts:
    """A `ProposalSource` whose tokens come from drafts on other nodes.

    Args:
        thread: the sessions on the drafts.
        num_speculative_tokens: most tokens of a request that a step verifies.
        vocabulary_size: of the target.
        fingerprint: of its tokenizer.
        session_prefix: unique for this process; begins the names of its sessions on drafts.
        max_wait_s: longest wait of a step.
        adapts: whether to wait, and to verify, only what is measured to pay; without it every step waits for whole
            proposals and verifies all of them.

    Attributes:
        counts: see there.
        overheads_s: seconds that each of the last steps spent here, waits for proposals not counted.
    """

    def __init__(
        self,
        thread: DraftThread,
        *,
        num_speculative_tokens: int,
        vocabulary_size: int,
        fingerprint: str,
        session_prefix: str,
        max_wait_s: float,
        adapts: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        zeros = [0] * num_speculative_tokens
        self.counts = SourceCounts(verified_at=zeros.copy(), accepted_at=zeros)
        self.overheads_s: deque[float] = deque(maxlen=_NUM_OVERHEADS)
        self._thread = thread
        self._num = num_speculative_tokens
        self._vocabulary_size = vocabulary_size
        self._fingerprint = fingerprint
        self._prefix = session_prefix
        self._max_wait_s = max_wait_s
        self._adapts = adapts
        self._clock = clock
        self._requests: dict[str, Drafted] = {}
        self._changed = threading.Condition()
        """Guards what follows, and the requests; notified of each part that arrives."""
        self._num_arrived = 0
        self._times = PassTimes()
        self._rates = AcceptanceRates.of_all_sessions()
        self._answers = AnswerTimes()
        self._commands: list[Command] = []
        self._num_sessions = 0
        self._num_silent = 0
        self._num_empty = 0
        """Of the request that last had a round, with a draft: a new one begins with it."""
        self._spent_s = 0.0
        self._advanced_at: float | None = None
        thread.deliver = self._receive

    @property
    def thread(self) -> DraftThread:
        """The sessions on the drafts."""
        return self._thread

    def add(self, request: EngineRequest) -> None:
        """See `ProposalSource`."""
        if not is_draftable(request) or request.request_id in self._requests:
            return
        begun = self._clock()
        rates = AcceptanceRates(self._rates)
        received = ReceivedTree(AcceptanceRule.COUPLED, rates)
        received.restart(request.num_tokens)
        times = DraftTimes(self._answers)
        with self._changed:
            self._requests[request.request_id] = Drafted(
                request,
                received,
                rates,
                times,
                request.num_tokens,
                request.num_tokens,
                begun,
                num_empty=self._num_empty,
            )
        self._num_sessions += 1
        name = f"{self._prefix}-{self._num_sessions}"
        message = open_message(request, name, self._vocabulary_size, self._fingerprint)
        self._thread.post([Begin(request.request_id, message, tuple(request.all_token_ids), self._num)])
        self._spent_s += self._clock() - begun

    def advance(self, requests: Sequence[EngineRequest], step: Step) -> None:
        """See `ProposalSource`."""
        begun = self._clock()
        self.counts.num_steps += 1
        self.counts.num_verified += step.num_verified
        if step.num_rows or step.prompts:
            self._times.observe(max(step.duration_s, 1e-9), step.num_rows, step.prompts)
        with self._changed:
            for request in requests:
                if (drafted := self._requests.get(request.request_id)) is not None:
                    self._follow(drafted, begun)
        self._post()
        self._spent_s += self._clock() - begun
        self._advanced_at = begun

    def propose(self, requests: Sequence[EngineRequest], max_rows: int) -> dict[str, Sequence[int]]:
        """See `ProposalSource`."""
        begun = self._clock()
        if self._advanced_at is not None:
            self._times.observe_rest(begun - self._advanced_at, speculates=True)
        with self._changed:
            drafted = [item for request in requests if (item := self._requests.get(request.request_id)) is not None]
            num_others = len(requests) - len(drafted)
            waited_s = self._choose(drafted, max_rows - num_others, begun)
        chosen: dict[str, Sequence[int]] = {item.request.request_id: item.verified for item in drafted if item.verified}
        self.overheads_s.append(self._spent_s + self._clock() - begun - waited_s)
        self._spent_s = 0.0
        return chosen

    def remove(self, request_id: str) -> None:
        """See `ProposalSource`."""
        with self._changed:
            item = self._requests.pop(request_id, None)
        if item is not None:
            self._count(item, item.request.all_token_ids[item.num_tokens :])
            self._thread.post([End(request_id)])

    def may_run(self, request: EngineRequest) -> bool:
        """See `ProposalSource`; every request may."""
        return True

    def close(self) -> None:
        """See `ProposalSource`."""
        self._thread.close()

    def _follow(self, item: Drafted, now: float) -> None:
        """Take the tokens that a step gave a request, and ask for those after them."""
        request, known = item.request, item.num_tokens
        new = tuple(request.all_token_ids[known:])
        if not new:
            return
        self._count(item, new)
        item.received.follow(new)
        item.num_tokens = known + len(new)
        item.num_rounds += 1
        num_wanted = self._num_wanted(item)
        if item.is_paused and not num_wanted:
            return
        item.asked_at, item.is_answering, item.is_paused = now, False, not num_wanted
        item.times.record_verdict(item.num_tokens, now)
        unsent = tuple(request.all_token_ids[item.num_sent :])
        item.num_sent = item.num_tokens
        self._commands.append(Advance(request.request_id, unsent, num_wanted))

    def _count(self, item: Drafted, new: Sequence[int]) -> None:
        """Count what a step verified of a request's proposal, and accepted."""
        if not new:
            return
        num_accepted = _common_len(item.verified, new)
        self.counts.num_accepted += num_accepted
        for place in range(len(item.verified)):
            self.counts.verified_at[place] += 1
            self.counts.accepted_at[place] += place < num_accepted
        item.verified = ()

    def _num_wanted(self, item: Drafted) -> int:
        is_of_use = item.rates.value(1, 1) >= _LEAST_VALUE and item.num_empty < _MAX_EMPTY_ROUNDS
        if is_of_use or not self._adapts or item.num_rounds % _TRIAL_CYCLE < _TRIAL_ROUNDS:
            return self._num
        return 0

    def _post(self) -> None:
        commands, self._commands = self._commands, []
        self._thread.post(commands)

    def _receive(self, request_id: str, part: ProposalPart) -> None:
        """Add a part to its request's tree. In the drafts' thread."""
        with self._changed:
            self._num_arrived += 1
            self._num_silent = 0
            if (item := self._requests.get(request_id)) is not None:
                self._add(item, part)
            self._changed.notify()

    def _add(self, item: Drafted, part: ProposalPart) -> None:
        # The request may have tokens already that were not followed yet, nor sent to the draft.
        if not item.received.fits(part, item.num_tokens):
            return
        now = self._clock()
        try:
            if part.first_node == 1:
                item.received.replace(part.base.len, item.request.all_token_ids[part.base.len : item.num_tokens])
            item.times.record_answer(part.known_len, now, len(part.nodes) if part.first_node == 1 else 0)
            item.times.step_s = part.step_time_s or item.times.step_s
            item.received.add(part)
        except (InvalidArgument, ValueError):
            # The draft's tree is of no use from here on; its next one begins anew.
            item.received.restart(item.num_tokens)
            return
        self.counts.num_proposed += len(part.nodes)
        item.arrived_at = now
        item.is_answering = item.is_answering or part.known_len == item.num_tokens

    def _choose(self, drafted: Sequence[Drafted], max_rows: int, begun: float) -> float:
        """Set what a step verifies of each request, after a wait where that pays; return the seconds of the wait."""
        num_arrived, waited_s = self._num_arrived, 0.0
        while True:
            lines = [self._line(item) for item in drafted]
            depths = self._depths([line for line, _ in lines], max_rows)
            left_s = begun + self._max_wait_s - self._clock()
            wait_s = self._wait_s([line for line, _ in lines], depths, left_s)
            if wait_s <= 0:
                break
            self._changed.wait(min(wait_s, left_s))
            waited_s = self._clock() - begun
        for item, (_, token_ids), num in zip(drafted, lines, depths, strict=True):
            item.verified = tuple(token_ids[:num])
            self._learn_lateness(item, is_empty=not token_ids)
        if waited_s:
            self.counts.wait_s += waited_s
            self.counts.num_waits += 1
            is_silent = self._num_arrived == num_arrived
            self.counts.num_silent_waits += is_silent
            self._num_silent += is_silent
        return waited_s

    def _learn_lateness(self, item: Drafted, *, is_empty: bool) -> None:
        """Count the rounds in which a request's draft gave nothing to verify; another draft is not judged by them."""
        was_open, item.is_open = item.is_open, item.request.request_id in self._thread.ready
        if item.is_open:
            item.num_empty = self._num_empty = item.num_empty + 1 if is_empty else 0
        elif was_open:
            item.num_empty = self._num_empty = 0

    def _depths(self, lines: Sequence[Line], max_rows: int) -> Sequence[int]:
        """Return how many tokens of each line a step verifies."""
        if self._adapts:
            return verified(lines, max_rows, self._times)
        return [min(len(line.values), max(0, max_rows // max(1, len(lines)) - 1)) for line in lines]

    def _wait_s(self, lines: Sequence[Line], depths: Sequence[int], left_s: float) -> float:
        """Return the seconds to wait before a step; 0 to begin it."""
        if left_s <= 0 or not lines:
            return 0.0
        if self._adapts:
            if self._num_silent >= _MAX_SILENT_WAITS:
                return 0.0
            return best_wait_s(lines, depths, left_s, self._times)
        is_waited_for = self._thread.num_connected > 0 and any(
            line.may_grow and len(line.values) < line.max_depth for line in lines
        )
        return left_s if is_waited_for else 0.0

    def _line(self, item: Drafted) -> tuple[Line, list[int]]:
        """Return a request's line, and its tokens."""
        most = min(self._num, item.request.num_prompt_tokens + item.request.max_tokens - item.num_tokens - 1)
        values, token_ids = item.received.best_line(most)
        is_ready = item.request.request_id in self._thread.ready
        is_complete = item.received.complete_len == item.num_tokens
        is_running = item.is_answering or (item.received.is_caught_up and bool(values))
        line = Line(
            values,
            most,
            item.rates,
            item.times if is_ready and not item.is_paused else None,
            is_running=is_running,
            asked_s=self._clock() - (max(item.arrived_at, item.asked_at) if is_running else item.asked_at),
            may_grow=not is_complete,
            first_depth=item.received.root_depth + 1,
        )
        return line, token_ids


def _common_len(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
