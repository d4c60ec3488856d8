"""Two drafters in one: a model or a head, and `suffix`. The best nodes of both are one tree (`combined_tree`).

What is found in texts costs next to nothing, so it comes first; where it is worth enough, the model does not draft at
all (`combined_worth`). A copy is drafted from its original then, and what is new by the model.

Under `rejection` the model always drafts and all its nodes are sent, as if it were alone: whether a sampled token is
proposed must not depend on a guess. What was found is guessed beside them, from the session's own text; where the model
runs ahead of verdicts, nothing is.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as with_changes
from itertools import takewhile
from typing import Final

from outrider.drafters.combined_tree import CombinedNode, CombinedTree
from outrider.drafters.combined_worth import Found, RoundTimes, Yields
from outrider.drafters.drafter import Drafter, DrafterInfo, OpenProposal, StepRows
from outrider.parameters import AcceptanceRule
from outrider.speculation.acceptance import AcceptanceRates
from outrider.tokens import FeatureSpan

_MAX_SESSIONS: Final = 4096
"""Whose state is kept, those used last."""
_DECAY: Final = 0.998
_NOTHING: Final = Found()
_WEIGHT: Final = 30.0
"""Where all sessions add to the rates, they are learnt slowly."""


@dataclass(slots=True, eq=False)
class _Combination:
    """A proposal and its parts.

    Attributes:
        proposal: that is made of them.
        main: that of the model.
        found: that of `suffix`, for the present round.
        tree: the nodes of both.
        numbered: nodes of the model's proposal, by their numbers there.
        uses_main: whether the model drafts in this round; None until that is decided.
        worth: of what was found in this round.
        begun_at: monotonic time at which the model began to draft in this round; 0 before.
        completed_at: monotonic time at which the proposal of this round was whole; 0 before.
    """

    proposal: OpenProposal
    main: OpenProposal
    found: OpenProposal
    tree: CombinedTree
    numbered: list[CombinedNode]
    uses_main: bool | None = None
    worth: Found = _NOTHING
    begun_at: float = 0.0
    completed_at: float = 0.0

    @property
    def is_coupled(self) -> bool:
        """Whether any tree is exact."""
        return self.proposal.terms.acceptance_rule is AcceptanceRule.COUPLED

    @property
    def runs_ahead(self) -> bool:
        """Whether the model drafts ahead of the target's verdicts."""
        return self.proposal.lookahead > 0

    @property
    def main_goes_on(self) -> bool:
        """Whether a step may advance the model's proposal."""
        return self.uses_main is not False and not self.main.complete

    @property
    def is_chain(self) -> bool:
        """Whether the request has a node followed by one at most."""
        return 0 < self.proposal.max_nodes <= self.proposal.num_speculative_tokens

    def set_sizes(self) -> None:
        """Give the parts the sizes of the proposal; of the nodes ahead of the text some are left to what is found."""
        whole, main = self.proposal, self.main
        num = main.num_speculative_tokens = whole.num_speculative_tokens
        main.max_nodes, main.lookahead = whole.max_nodes, whole.lookahead
        if self.is_coupled and self.runs_ahead:
            main.lookahead -= min(num, whole.lookahead // 2)


@dataclass(slots=True)
class _Session:
    """What was learnt from a session, or from all, and its latest proposal."""

    rates: AcceptanceRates
    yields: Yields
    combination: _Combination | None = None


class CombinedDrafter(Drafter):
    """A `Drafter` of two; see the module.

    Args:
        main: a model or a head.
        suffix: finds texts; all its nodes are guesses.
        max_nodes: nodes of a proposal whose request does not bound them; 0 for no bound but that of the model.
    """

    def __init__(self, main: Drafter, suffix: Drafter, max_nodes: int = 0) -> None:
        self._main = main
        self._suffix = suffix
        self._max_nodes = max_nodes
        self._names = main.info.drafter, suffix.info.drafter
        self._info = with_changes(main.info, drafter="+".join(self._names))
        self.times = main.times
        self.compiler = main.compiler
        self._round_times = RoundTimes()
        self._all = _Session(AcceptanceRates(decay=_DECAY, prior_weight=_WEIGHT), Yields())
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    @property
    def info(self) -> DrafterInfo:
        """Identity and limits: those of the model, and the names of both."""
        return self._info

    @property
    def used_bytes(self) -> int:
        """Memory of both, in bytes."""
        return self._main.used_bytes + self._suffix.used_bytes

    @property
    def num_rows_alone(self) -> int:
        """Rows of the model; see `Drafter`."""
        return self._main.num_rows_alone

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        """Look up what is not found yet, run a step of the model where that pays, and add the nodes of both.

        Returns:
            The model's rows; a lookup alone counts as none.
        """
        items = [item for proposal in proposals if (item := self._combination(proposal)) is not None]
        self._look_up(items)
        drafting = [item for item in items if item.main_goes_on]
        now = time.monotonic()
        for item in drafting:
            item.begun_at = item.begun_at or now
            item.main.missing_features_from = None
        rows = self._main.step([item.main for item in drafting]) if drafting else StepRows()
        for item in items:
            self._settle(item)
        return rows

    def truncate(self, session_id: str, length: int) -> None:
        """Have both record that tokens from position `length` on may have changed."""
        self._main.truncate(session_id, length)
        self._suffix.truncate(session_id, length)

    def advance(self, proposal: OpenProposal, token_ids: Sequence[int]) -> bool:
        """Learn from the text; go on below it where the model does and all of it was sent."""
        item = self._known(proposal)
        if item is None:
            return False
        item.set_sizes()
        main_goes_on = self._main.advance(item.main, token_ids)
        all_sent, drafters = item.tree.follow(token_ids)
        self._observe(item, drafters)
        # Under `rejection` the model may sample next what was guessed, and so sent, before.
        if not (main_goes_on and all_sent and item.is_coupled and proposal.num_speculative_tokens):
            return False
        item.found, item.uses_main = _part_of(proposal), None
        item.begun_at = item.completed_at = 0.0
        proposal.complete = False
        return True

    def end(self, proposal: OpenProposal) -> None:
        """Drop the state of the proposal in both."""
        item = self._known(proposal)
        if item is not None:
            self._sessions[proposal.session_id].combination = None
            self._main.end(item.main)
            self._suffix.end(item.found)

    def forget(self, session_id: str) -> None:
        """Drop the state of the session in both."""
        self._sessions.pop(session_id, None)
        self._main.forget(session_id)
        self._suffix.forget(session_id)

    def resume(self, session_id: str) -> int:
        """Begin a session; return the number of positions whose features the model has used."""
        self._suffix.resume(session_id)
        return self._main.resume(session_id)

    def give(self, session_id: str, features: FeatureSpan) -> bool:
        """Have the model take features; see `Drafter`."""
        return self._main.give(session_id, features)

    def _known(self, proposal: OpenProposal) -> _Combination | None:
        session = self._sessions.get(proposal.session_id)
        item = session.combination if session is not None else None
        return item if item is not None and item.proposal is proposal else None

    def _combination(self, proposal: OpenProposal) -> _Combination | None:
        """Return the parts of a proposal; None, completing it, where they were dropped."""
        session = self._session(proposal.session_id)
        item = session.combination
        if item is None or item.proposal is not proposal:
            if proposal.nodes:
                # The nodes that were sent stand; more follow under the next base.
                proposal.complete = True
                return None
            tree = CombinedTree(session.rates)
            item = _Combination(proposal, _part_of(proposal), _part_of(proposal), tree, [tree.root])
            item.set_sizes()
            session.combination = item
        return item

    def _session(self, session_id: str) -> _Session:
        if session_id not in self._sessions:
            self._sessions[session_id] = _Session(AcceptanceRates(self._all.rates), Yields(self._all.yields))
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(session_id)
        return self._sessions[session_id]

    def _look_up(self, items: Sequence[_Combination]) -> None:
        """Run a step of `suffix` for those that it has not completed, and decide for whom the model drafts."""
        for item in items:
            item.found.complete = item.found.complete or (item.runs_ahead and not item.is_coupled)
        if looking := [item.found for item in items if not item.found.complete]:
            self._suffix.step(looking)
        for item in items:
            if item.found.complete and item.uses_main is None:
                item.worth = Found.of([node.parent for node in item.found.nodes], item.found.values)
                yields = self._session(item.proposal.session_id).yields
                pays = yields.model_pays(item.worth, self._round_times)
                item.uses_main = pays or item.runs_ahead or not item.is_coupled

    def _settle(self, item: _Combination) -> None:
        """Add nodes to a proposal, all of a round together unless it runs ahead; complete it after the last."""
        proposal, main = item.proposal, item.main
        proposal.missing_features_from = main.missing_features_from if item.main_goes_on else None
        is_whole = item.found.complete and not item.main_goes_on
        if is_whole and main.refusal is not None and not item.found.nodes:
            proposal.refuse(main.refusal)
        elif is_whole or (item.runs_ahead and item.found.complete):
            self._join(item)
            bounds = proposal.max_nodes or self._max_nodes, proposal.lookahead
            bound = min((num for num in bounds if num), default=0)
            proposal.nodes += item.tree.take(bound, is_chain=item.is_chain)
            proposal.complete, proposal.took_steps = is_whole, item.begun_at > 0
            if is_whole:
                self._time(item)

    def _join(self, item: _Combination) -> None:
        """Add the nodes of both that are new to the tree, those of the model first."""
        main, suffix = self._names
        for node in item.main.nodes[len(item.numbered) - 1 :]:
            parent = item.numbered[node.parent]
            item.numbered.append(item.tree.add(parent, node, main, must_be_sent=not item.is_coupled))
        found = [item.tree.root]
        for node in item.found.nodes:
            found.append(item.tree.add(found[node.parent], node, suffix))
        item.found.nodes.clear()

    def _time(self, item: _Combination) -> None:
        """Record when a round's proposal was whole, and what the model's steps took."""
        item.completed_at = time.monotonic()
        if item.begun_at and item.uses_main:
            self._round_times.steps_s.observe(item.completed_at - item.begun_at)

    def _observe(self, item: _Combination, drafters: Sequence[str]) -> None:
        """Learn from a round whose text begins with nodes of these drafters."""
        if not item.completed_at:
            return
        self._round_times.rest_s.observe(time.monotonic() - item.completed_at)
        num_main, num_found = (_num_proposed(name, drafters) for name in self._names)
        yields = self._session(item.proposal.session_id).yields
        yields.observe_found(item.worth, num_found)
        if item.uses_main:
            yields.observe_model(num_main)


def _num_proposed(name: str, drafters: Sequence[str]) -> int:
    """Return how many tokens a drafter has proposed before the first that it has not."""
    own = takewhile(lambda names: name in names.split("+"), drafters)
    return sum(1 for _ in own)


def _part_of(proposal: OpenProposal) -> OpenProposal:
    """Return a proposal for the same text, which waits for verdicts."""
    return OpenProposal(
        proposal.session_id,
        proposal.token_ids,
        proposal.terms,
        proposal.num_speculative_tokens,
        proposal.max_nodes,
        max_len=proposal.max_len,
    )
