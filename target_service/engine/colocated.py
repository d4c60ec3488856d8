"""Drafting within the target's process, on its engine's thread.

A step of the draft comes between two passes of the target, for all sessions that wait for a proposal together. No
network lies between the two models, and neither runs while the other does.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from outrider.drafters.drafter import Drafter, DraftTerms, OpenProposal
from outrider.drafters.stepping import SentProposal, Stepper
from outrider.errors import OutriderError
from outrider.serving.unexpected import UnexpectedErrors
from target_service.engine.request import Request

_MAX_KNOWN_SESSIONS: Final = 4096


@dataclass(slots=True, eq=False)
class _Drafting:
    """A proposal for a round of a request."""

    request: Request
    sent: SentProposal

    @property
    def is_wanted(self) -> bool:
        """Whether the request still waits for it."""
        return self.request.base == self.sent.base and _waits(self.request)

    def give(self, step_time_s: float, now: float) -> None:
        """Hand over the nodes drafted since the last time; a request that cannot be drafted for decodes plainly."""
        speculation, token_ids = self.request.speculation, self.request.resident.token_ids
        if self.sent.proposal.refusal is not None:
            speculation.refuse(len(token_ids))
        elif (part := self.sent.next_part(step_time_s)) is not None:
            speculation.receive(part, token_ids, now)


class ColocatedDraft:
    """Drafts for the requests of this process; see the module. Called in the engine's thread.

    Args:
        drafter: one that needs no features of the target.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._draftings: dict[str, _Drafting] = {}
        self._known_lens: OrderedDict[str, int] = OrderedDict()
        self._stepper = Stepper(drafter)
        self._unexpected = UnexpectedErrors()

    @property
    def kind(self) -> str:
        """Name of the drafter."""
        return self._drafter.info.drafter

    @property
    def is_busy(self) -> bool:
        """Whether another step would extend a proposal."""
        return bool(self._draftings)

    def step(self, requests: Iterable[Request]) -> None:
        """Run a step for the requests that wait for a proposal of this process, if any do."""
        self._draftings = {key: item for key, item in self._draftings.items() if item.is_wanted}
        for request in requests:
            if _waits(request) and request.resident.session_id not in self._draftings:
                try:
                    self._draftings[request.resident.session_id] = self._begin(request)
                except Exception as error:
                    self._do_without(request, error)
        if not self._draftings:
            return
        self._stepper.step([item.sent.proposal for item in self._draftings.values()])
        now = time.monotonic()
        for key, item in list(self._draftings.items()):
            try:
                item.give(self._stepper.step_time_s, now)
            except Exception as error:
                self._do_without(item.request, error)
                del self._draftings[key]
                continue
            if item.sent.proposal.complete:
                del self._draftings[key]

    def reset(self, requests: Iterable[Request], error: Exception) -> None:
        """Drop all proposals after an error that concerns no single session: the requests decode plainly."""
        self._draftings.clear()
        for request in requests:
            if _waits(request):
                self._do_without(request, error)

    def _do_without(self, request: Request, error: Exception) -> None:
        self._unexpected.log("drafting failed, the request decodes plainly", error, **request.log_fields)
        request.speculation.refuse(len(request.resident.token_ids))

    def _begin(self, request: Request) -> _Drafting:
        session_id, tokens = request.resident.session_id, request.resident.token_ids
        # Tokens that the draft has beyond the known length are its own guesses.
        self._drafter.truncate(session_id, min(self._known_lens.get(session_id, 0), len(tokens)))
        self._known_lens[session_id] = len(tokens)
        self._known_lens.move_to_end(session_id)
        # A session that is dropped from here is run by the draft from its first token again.
        if len(self._known_lens) > _MAX_KNOWN_SESSIONS:
            self._known_lens.popitem(last=False)
        terms = DraftTerms(
            request.parameters, request.rule, request.prompt_len, request.stop_token_ids, request.cache_salt
        )
        proposal = OpenProposal(session_id, tuple(tokens), terms, request.speculation.num_wanted)
        return _Drafting(request, SentProposal(request.base, proposal, len(tokens)))


def check_colocated(drafter: Drafter, tokenizer_fingerprint: str) -> None:
    """Raise `OutriderError` unless a drafter can draft within a target of that tokenizer."""
    info = drafter.info
    if info.feature_layers:
        raise OutriderError(f"{info.drafter} drafts from features, which takes a draft service")
    if info.tokenizer_fingerprint and tokenizer_fingerprint and info.tokenizer_fingerprint != tokenizer_fingerprint:
        raise OutriderError(f"{info.model} has another tokenizer than the target")


def _waits(request: Request) -> bool:
    speculation = request.speculation
    wants = speculation.terms.own_draft and speculation.waits and request.can_run and request.num_uncached == 1
    return wants and not request.is_ready(time.monotonic())
