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
from typing import TYPE_CHECKING, Final

from outrider.drafters.combination import Combination, num_proposed, part_of
from outrider.drafters.combined_tree import CombinedTree
from outrider.drafters.combined_worth import Found, RoundTimes, Yields
from outrider.drafters.drafter import Drafter, DrafterInfo, OpenProposal, StepRows
from outrider.parameters import AcceptanceRule
from outrider.speculation.acceptance import AcceptanceRates

if TYPE_CHECKING:
    from outrider.drafters.features import Features

_MAX_SESSIONS: Final = 4096
"""Whose state is kept, those used last."""


@dataclass(slots=True)
class _Session:
    """What was learnt from a session, or from all, and its latest proposal.

    Attributes:
        rates: of acceptance.
        own_rates: the same, learnt from this session alone; for `rejection`, see `tree.root_tree`.
        yields: of proposals.
        combination: the proposal.
    """

    rates: AcceptanceRates
    yields: Yields
    own_rates: AcceptanceRates | None = None
    combination: Combination | None = None


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
        self._all = _Session(AcceptanceRates.of_all_sessions(), Yields())
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

    @property
    def tokens_per_step(self) -> int:
        """Those of the drafter with a model."""
        return self._main.tokens_per_step

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
        for item in drafting:
            waits = item.main.missing_features_from is not None
            item.is_timed = item.is_timed and not rows.prompts and not waits
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
        may_go_on = item.main.refusal is None and (item.is_coupled or not item.has_guesses)
        if not (main_goes_on and all_sent and may_go_on and proposal.num_speculative_tokens):
            return False
        item.found, item.uses_main, item.is_timed = part_of(proposal), None, True
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

    def give(self, session_id: str, features: "Features") -> bool:
        """Have the model take features; see `Drafter`."""
        return self._main.give(session_id, features)

    def _known(self, proposal: OpenProposal) -> Combination | None:
        session = self._sessions.get(proposal.session_id)
        item = session.combination if session is not None else None
        return item if item is not None and item.proposal is proposal else None

    def _combination(self, proposal: OpenProposal) -> Combination | None:
        """Return the parts of a proposal; None, completing it, where they were dropped."""
        session = self._session(proposal.session_id)
        item = session.combination
        if item is None or item.proposal is not proposal:
            if proposal.nodes:
                # The nodes that were sent stand; more follow under the next base.
                proposal.complete = True
                return None
            item = session.combination = self._begun(proposal, session)
        return item

    def _begun(self, proposal: OpenProposal, session: _Session) -> Combination:
        rates = session.rates
        if proposal.terms.acceptance_rule is AcceptanceRule.REJECTION:
            rates = session.own_rates = session.own_rates or AcceptanceRates()
        tree = CombinedTree(self._names, rates)
        item = Combination(proposal, part_of(proposal), part_of(proposal), tree, [tree.root])
        item.set_sizes()
        return item

    def _session(self, session_id: str) -> _Session:
        if session_id not in self._sessions:
            if len(self._sessions) >= _MAX_SESSIONS:
                idle = (known for known, session in self._sessions.items() if session.combination is None)
                self._sessions.pop(next(idle, ""), None)
            self._sessions[session_id] = _Session(AcceptanceRates(self._all.rates), Yields(self._all.yields))
        self._sessions.move_to_end(session_id)
        return self._sessions[session_id]

    def _look_up(self, items: Sequence[Combination]) -> None:
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

    def _settle(self, item: Combination) -> None:
        """Add nodes to a proposal, all of a round together unless it runs ahead; complete it after the last."""
        proposal, main = item.proposal, item.main
        proposal.missing_features_from = main.missing_features_from if item.main_goes_on else None
        # A model that is whole waits for no lookup that still learns its text.
        is_whole = not item.main_goes_on
        if is_whole and main.refusal is not None and not item.found.nodes and not proposal.nodes:
            proposal.refuse(main.refusal)
        elif is_whole or self._sends_part(item):
            self._join(item)
            proposal.nodes += item.tree.take(self._bound(proposal), is_chain=item.is_chain)
            proposal.complete, proposal.took_steps = is_whole, item.begun_at > 0
            if is_whole:
                self._time(item)

    def _sends_part(self, item: Combination) -> bool:
        """Whether the nodes that are here are sent while the model drafts on.

        Not where a bound leaves room for the best of all only; nor before the first of a model, which is soon there.
        """
        if item.runs_ahead or not item.is_coupled:
            return item.runs_ahead
        is_free = not self._bound(item.proposal)
        return is_free and item.found.complete and (bool(item.main.nodes) or not item.is_timed)

    def _bound(self, proposal: OpenProposal) -> int:
        """Return how many nodes may be live; 0 for as many as there are."""
        own = max(self._max_nodes, proposal.num_speculative_tokens) if self._max_nodes else 0
        return min((num for num in (proposal.max_nodes or own, proposal.lookahead) if num), default=0)

    def _join(self, item: Combination) -> None:
        """Add the nodes of both that are new to the tree, those of the model first."""
        main, suffix = self._names
        for node in item.main.nodes[len(item.numbered) - 1 :]:
            parent = item.numbered[node.parent]
            item.numbered.append(item.tree.add(parent, node, main, must_be_sent=not item.is_coupled))
        found = [item.tree.root]
        for node in item.found.nodes:
            found.append(item.tree.add(found[node.parent], node, suffix))
            item.has_guesses = True
        item.found.nodes.clear()

    def _time(self, item: Combination) -> None:
        """Record when a round's proposal was whole, and what the model's steps took."""
        item.completed_at = time.monotonic()
        if item.begun_at and item.uses_main and item.is_timed:
            self._round_times.steps_s.observe(item.completed_at - item.begun_at)

    def _observe(self, item: Combination, drafters: Sequence[tuple[str, ...]]) -> None:
        """Learn from a round whose text begins with nodes of these drafters."""
        if not item.completed_at:
            return
        self._round_times.rest_s.observe(time.monotonic() - item.completed_at)
        num_main, num_found = (num_proposed(name, drafters) for name in self._names)
        yields = self._session(item.proposal.session_id).yields
        yields.observe_found(item.worth, num_found)
        if item.uses_main:
            yields.observe_model(num_main)
