"""Drafting within the target's process, on its engine's thread.

A step of the draft comes between two passes of the target, for all sessions that wait for a proposal together. No
network lies between the two models, and neither runs while the other does. A head reads the target's features where
they are.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from outrider.drafters.drafter import Drafter, DraftTerms, OpenProposal
from outrider.drafters.features import Features
from outrider.drafters.stepping import SentProposal, Stepper
from outrider.errors import ModelMismatch, ModelUnsupported, OutriderError, Overloaded, TokenizerMismatch
from outrider.grammar.compiler import CompiledGrammar
from outrider.lm.model import FeatureSource, LanguageModel
from outrider.serving.unexpected import UnexpectedErrors
from outrider.tokens import Base
from target_service.engine.request import Request

_MAX_STEPS_S: Final = 0.01
"""Seconds of steps after which commands are applied again: turns of the engine between short ones cost as much."""
_FEW_ROWS: Final = 16
"""Rows of a head's step up to which reading its weights takes most of the time."""


@dataclass(slots=True, eq=False)
class _Drafting:
    """A request that is drafted for, and its latest proposal.

    Attributes:
        request: the request.
        sent: the proposal, and how much of it the request has.
        base: the round that it is for; that of `sent` is where its tree began.
        features_len: positions from 0 on whose features the draft has had, or does not need.
    """

    request: Request
    sent: SentProposal
    base: Base
    features_len: int

    @property
    def is_wanted(self) -> bool:
        """Whether the request still waits for more of the proposal."""
        # Whether it waits is decided anew where nodes have come, so that is asked last.
        return not self.sent.proposal.complete and self.request.base == self.base and _waits(self.request)

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
        drafter: the drafter.
        features: the target's; needed by drafters that read them.
    """

    def __init__(self, drafter: Drafter, features: FeatureSource | None = None) -> None:
        self._drafter = drafter
        self._features = features
        self._draftings: dict[int, _Drafting] = {}
        self._grammars: dict[int, CompiledGrammar] = {}
        self._gone: set[str] = set()
        self._num_given = 0
        self._stepper = Stepper(drafter)
        self._unexpected = UnexpectedErrors()

    @property
    def kind(self) -> str:
        """Name of the drafter."""
        return self._drafter.info.drafter

    @property
    def is_busy(self) -> bool:
        """Whether another step would extend a proposal."""
        return any(item.is_wanted for item in self._draftings.values())

    def step(self, requests: Collection[Request]) -> None:
        """Run steps for the requests that wait for a proposal of this process: one, or short ones one after another.

        Args:
            requests: all that are open.
        """
        self._end_others(requests)
        for request in requests:
            if _waits(request):
                self._try(request, partial(self._begin, request))
        until = time.monotonic() + _MAX_STEPS_S
        while drafted := [item for item in self._draftings.values() if item.is_wanted]:
            # Columns of the text, and about two nodes of each tree.
            num_rows, self._num_given = self._num_given + 2 * len(drafted), 0
            with _one_of_two_threads() if self._is_short(num_rows) else contextlib.nullcontext():
                self._stepper.step([item.sent.proposal for item in drafted])
            now = time.monotonic()
            for item in drafted:
                self._try(item.request, partial(self._hand_over, item, now))
            if now > until:
                break

    def reset(self, requests: Collection[Request], error: Exception) -> None:
        """Drop all proposals after an error that concerns no single session: the requests decode plainly."""
        self._draftings.clear()
        for request in requests:
            if _waits(request):
                self._do_without(request, error)

    def forget(self, session_id: str) -> None:
        """Have the draft drop what it keeps of a session, at the next step, or when no request runs on it any more."""
        self._gone.add(session_id)

    def _try(self, request: Request, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._do_without(request, error)

    def _do_without(self, request: Request, error: Exception) -> None:
        self._unexpected.log("drafting failed, the request decodes plainly", error, **request.log_fields)
        request.speculation.refuse(len(request.resident.token_ids))
        self._draftings.pop(request.number, None)

    def _end_others(self, requests: Collection[Request]) -> None:
        """Drop proposals and grammars of requests that are closed, and the sessions to forget that none runs on."""
        if self._draftings:
            for number in self._draftings.keys() - {request.number for request in requests}:
                self._drafter.end(self._draftings.pop(number).sent.proposal)
        if self._grammars:
            for number in self._grammars.keys() - {request.number for request in requests}:
                self._grammars.pop(number).drop()
        if self._gone:
            for session_id in self._gone - {request.resident.session_id for request in requests}:
                self._gone.discard(session_id)
                self._drafter.forget(session_id)

    def _begin(self, request: Request) -> None:
        """Have a proposal for the round of a request, if it has none: the last one goes on where it can."""
        item = self._draftings.get(request.number)
        if item is not None and item.base == request.base:
            return
        if item is not None and self._goes_on(item):
            return
        session_id, tokens = request.resident.session_id, request.resident.token_ids
        # The tokens of an earlier request of the session need not be those of this one.
        known_len = item.base.len if item is not None else 0
        features_len = item.features_len if item is not None else self._drafter.resume(session_id)
        self._drafter.truncate(session_id, known_len)
        proposal = OpenProposal(
            session_id,
            tokens,
            self._terms(request),
            self._num_wanted(request),
            request.speculation.terms.max_nodes,
            max_len=self._drafter.info.max_session_len,
        )
        sent = SentProposal(request.base, proposal, len(tokens))
        item = self._draftings[request.number] = _Drafting(request, sent, request.base, features_len)
        self._give_features(item, features_len)

    def _goes_on(self, item: _Drafting) -> bool:
        """Have the drafter observe what became of a proposal; return whether the proposal goes on, else end it."""
        request, proposal = item.request, item.sent.proposal
        news = request.resident.token_ids[item.base.len :]
        if news and proposal.refusal is None:
            proposal.num_speculative_tokens = self._num_wanted(request)
            if self._drafter.advance(proposal, news):
                item.sent.advance(request.base)
                item.base = request.base
                return True
        self._drafter.end(proposal)
        return False

    def _hand_over(self, item: _Drafting, now: float) -> None:
        item.give(self._stepper.step_time_s, now)
        start = item.sent.proposal.missing_features_from
        if start is not None:
            self._give_features(item, start)
            if item.sent.proposal.missing_features_from is not None:
                raise OutriderError("features of positions that are not cached are missing")

    def _give_features(self, item: _Drafting, start: int) -> None:
        """Give the drafter the features of the session's cached positions from `start` on."""
        layers, resident = self._drafter.info.feature_layers, item.request.resident
        end = resident.cache.cached_len
        if not layers or self._features is None or start >= end:
            return
        rows = self._features.read(resident.cache, layers, start, end)
        self._drafter.give(resident.session_id, Features(start, rows))
        self._num_given += end - start
        item.features_len, item.sent.proposal.missing_features_from = end, None

    def _is_short(self, num_rows: int) -> bool:
        """Whether a step is that of a head, over few rows. Other drafters have the target's kind of pass."""
        return bool(self._drafter.info.feature_layers) and num_rows <= _FEW_ROWS

    def _num_wanted(self, request: Request) -> int:
        """Return the length of the main line to propose, cut where the longest session of the drafter ends."""
        room = self._drafter.info.max_session_len - len(request.resident.token_ids)
        return min(request.speculation.num_wanted, room)

    def _terms(self, request: Request) -> DraftTerms:
        return DraftTerms(
            request.parameters,
            request.rule,
            request.prompt_len,
            request.stop_token_ids,
            request.cache_salt,
            request.speculation.terms.p_min,
            request.prediction,
            self._grammar(request),
        )

    def _grammar(self, request: Request) -> CompiledGrammar | None:
        """Return the grammar of a request for the draft: its own, so that no proposal decides about the request's."""
        constraint, compiler = request.parameters.constraint, self._drafter.compiler
        if constraint is None or compiler is None:
            return None
        known = self._grammars.get(request.number)
        if known is None:
            with contextlib.suppress(Overloaded):
                known = self._grammars[request.number] = compiler.begin(constraint)
        return known


@contextlib.contextmanager
def _one_of_two_threads() -> Iterator[None]:
    """Use one of two threads: the verdict that went out before is handled on the other core meanwhile.

    Short products on both wait for a core that is busy: a session with a head was 1.12 times as fast greedily, and 1.16
    times at temperature 1, with one. More than two threads were not measured.
    """
    if torch.get_num_threads() != 2:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(2)


def check_colocated(drafter: Drafter, model: LanguageModel) -> None:
    """Raise `OutriderError` unless a drafter can draft within a target that runs this model."""
    info, target = drafter.info, model.info
    own, others = info.tokenizer_fingerprint, target.tokenizer_fingerprint
    if own and others and own != others:
        raise TokenizerMismatch(f"{info.model} has another tokenizer than the target", draft=own, target=others)
    if not info.feature_layers:
        return
    if model.features is None or info.hidden_size != target.hidden_size:
        raise ModelUnsupported(f"{info.model} takes features of {info.hidden_size} numbers, which this target has not")
    if info.target_fingerprint and target.weights_fingerprint not in ("", info.target_fingerprint):
        raise ModelMismatch(
            f"{info.model} was made for target {info.target_fingerprint}, this is {target.weights_fingerprint}"
        )


def _waits(request: Request) -> bool:
    speculation = request.speculation
    wants = speculation.terms.own_draft and speculation.waits and request.can_run and request.num_uncached == 1
    return wants and not request.is_ready(time.monotonic())
