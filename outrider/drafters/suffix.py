"""Drafting from what was said: the tokens that followed the session's end elsewhere (Oliaro et al. 2024)."""

from collections.abc import Iterator, Sequence
from typing import Final

from outrider.control.pass_times import PassTimes
from outrider.drafters.drafter import Drafter, DrafterInfo, DraftTerms, OpenProposal, StepRows
from outrider.drafters.options import SuffixScope
from outrider.drafters.shares import share_rows
from outrider.drafters.states import BoundedStates
from outrider.drafters.suffix_corpus import ENTRY_BYTES, LONGEST, Occurrence, SuffixCorpus
from outrider.drafters.suffix_tree import SuffixTree, TreeSizes
from outrider.parameters import AcceptanceRule
from outrider.speculation.acceptance import MAX_RANK
from outrider.speculation.prediction import Prediction
from outrider.tenants import DEFAULT_TENANT, cache_salt
from outrider.tokens import NodeKind, ProposalNode, SparseDistribution

KIND: Final = "suffix"
_LEAST_VALUE: Final = 0.1
"""Of a node that is proposed: verifying one costs about a tenth of a pass where cores are few."""
_CHUNK_LEN: Final = 2048
"""Tokens of texts that a step learns, of all sessions: they take 20 ms, for which the others wait."""
_PREDICTION_LEN: Final = 4
"""A prediction counts as a match that is this much longer than what it has agreed with: somebody expects it."""
_TENANT_SHARE: Final = 4
"""One tenant's texts take one part in so many of the memory, at most."""


class SuffixDrafter(Drafter):
    """A `Drafter` without a model, which learns from texts.

    A text is forgotten with its session, and where memory ends: the oldest tokens of a tenant first, and the texts of
    the tenant, or the session, that was idle longest.

    Under `rejection` a proposal is a chain drafted from the session's own text, so that it is a point mass: a text of
    the same seed that another session has sampled depends on the noise by which this one is about to be judged.

    The prediction of a request is a text of its own, which no other request is drafted from.

    Args:
        scope: whose texts a session is drafted from.
        budget_bytes: memory of all texts and their indexes.
        max_session_len: longest session, in tokens.
        only_guesses: whether nodes are guesses under `rejection` too, and trees as under `coupled`: beside a drafter
            whose nodes are drafted.
    """

    def __init__(
        self, scope: SuffixScope, budget_bytes: int, max_session_len: int, *, only_guesses: bool = False
    ) -> None:
        self.times = PassTimes()
        self._scope = scope
        self._only_guesses = only_guesses
        self._max_shared_tokens = max(1, budget_bytes // (_TENANT_SHARE * ENTRY_BYTES))
        # The index of one session's text alone fits.
        num_indexed = max(1, min(max_session_len, budget_bytes // (2 * ENTRY_BYTES)))
        self._corpora = BoundedStates(lambda: SuffixCorpus(num_indexed), budget_bytes)
        self._keys: dict[str, str] = {}
        self._predictions: dict[str, _Predicted] = {}
        self._info = DrafterInfo.of_lookup(KIND, max_session_len)

    @property
    def info(self) -> DrafterInfo:
        """Identity and limits."""
        return self._info

    @property
    def used_bytes(self) -> int:
        """Memory of the texts and their indexes, in bytes, about."""
        return self._corpora.used_bytes

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        """Learn a part of the sessions' new tokens; complete each proposal whose session has none left, or no room."""
        corpora = [self._corpus(proposal) for proposal in proposals]
        missing = [
            len(proposal.token_ids) - len(corpus.text(proposal.session_id))
            for proposal, corpus in zip(proposals, corpora, strict=True)
        ]
        shares = share_rows([max(1, num) for num in missing], _CHUNK_LEN)
        in_use = {self._keys[proposal.session_id] for proposal in proposals}
        for proposal, corpus, num, share in zip(proposals, corpora, missing, shares, strict=True):
            if num > 0 and not self._corpora.make_room(corpus.more_bytes(num), in_use):
                # Learning a part of it would put out what was learnt of others, and itself be put out.
                proposal.complete = True
                continue
            start = len(proposal.token_ids) - num
            corpus.extend(proposal.session_id, proposal.token_ids[start : start + share])
            if num <= share:
                self._fill(proposal, corpus)
            self._corpora.weigh(self._keys[proposal.session_id])
        return StepRows(sum(len(proposal.nodes) for proposal in proposals))

    def truncate(self, session_id: str, length: int) -> None:
        """Drop the session's text if it has tokens from position `length` on; it is learnt again from its start."""
        known = self._predictions.get(session_id)
        if known is not None and known.known_len > length:
            del self._predictions[session_id]
        corpus = self._corpora.find(self._keys.get(session_id, ""))
        if corpus is not None and len(corpus.text(session_id)) > length:
            self.forget(session_id)

    def forget(self, session_id: str) -> None:
        """Drop the session's text: nothing is drafted from it any more."""
        self._predictions.pop(session_id, None)
        key = self._keys.pop(session_id, "")
        corpus = self._corpora.find(key)
        if corpus is not None and key != _own_key(session_id):
            corpus.remove(session_id)
        elif corpus is not None:
            self._corpora.forget(key)

    def _corpus(self, proposal: OpenProposal) -> SuffixCorpus:
        """Return the texts that a session is drafted from, its own included."""
        session_id, terms = proposal.session_id, proposal.terms
        shared = self._shared_key(terms)
        key = shared or _own_key(session_id)
        if self._keys.get(session_id, key) != key:
            self.forget(session_id)  # its requests go by different rules
        self._keys[session_id] = key
        return self._corpora.use(key, (lambda: SuffixCorpus(self._max_shared_tokens)) if shared else None)

    def _shared_key(self, terms: DraftTerms) -> str:
        """Return the key of the texts that sessions of these terms share; empty for those that share none."""
        is_default = terms.cache_salt in (b"", cache_salt(DEFAULT_TENANT))
        shares = self._scope is SuffixScope.ALL or (self._scope is SuffixScope.TENANT and not is_default)
        if not shares or terms.acceptance_rule is AcceptanceRule.REJECTION:
            return ""
        return f"tenant {terms.cache_salt.hex()}"

    def _fill(self, proposal: OpenProposal, corpus: SuffixCorpus) -> None:
        """Complete a proposal with the nodes that continue its session."""
        is_coupled = proposal.terms.acceptance_rule is AcceptanceRule.COUPLED
        is_drafted = not is_coupled and not self._only_guesses
        found = [*self._predicted(proposal), *corpus.occurrences(proposal.session_id)]
        if not found:
            proposal.complete = True
            return
        tree = SuffixTree(corpus.text(proposal.session_id), _sizes(proposal, is_drafted=is_drafted))
        kind = NodeKind.DRAFTED if is_drafted else NodeKind.GUESSED
        grown = tree.grow(found)
        nodes = [
            ProposalNode(
                node.parent,
                node.token_id,
                kind,
                SparseDistribution((node.token_id,), (1.0,)) if is_drafted else None,
                likelihood=node.probability if is_coupled else 0.0,
            )
            for node in grown
        ]
        proposal.fill(nodes, [node.value for node in grown])

    def _predicted(self, proposal: OpenProposal) -> Iterator[Occurrence]:
        """Yield the place in the request's prediction to which its output has come, if there is one."""
        given, session_id = proposal.terms.prediction, proposal.session_id
        if not given:
            self._predictions.pop(session_id, None)
            return
        known = self._predictions.get(session_id)
        if known is None or known.given is not given:
            known = self._predictions[session_id] = _Predicted(given, proposal.terms.prompt_len)
        known.follow(proposal.token_ids)
        prediction = known.prediction
        if prediction.position is not None and prediction.position < len(prediction.token_ids):
            length = min(LONGEST, _PREDICTION_LEN + prediction.num_agreeing)
            yield Occurrence(prediction.token_ids, prediction.position, length)


class _Predicted:
    """The prediction of a session's request.

    Attributes:
        given: as the terms have it.
        prediction: follows it.
        known_len: tokens of the session that it has followed.
    """

    def __init__(self, given: Sequence[int], prompt_len: int) -> None:
        self.given = given
        self.prediction = Prediction(given)
        self.known_len = prompt_len

    def follow(self, token_ids: Sequence[int]) -> None:
        """Follow a session's new tokens."""
        self.prediction.follow(token_ids[self.known_len :])
        self.known_len = max(self.known_len, len(token_ids))


def _own_key(session_id: str) -> str:
    return f"session {session_id}"


def _sizes(proposal: OpenProposal, *, is_drafted: bool) -> TreeSizes:
    terms, num, lookahead, max_nodes = (
        proposal.terms,
        proposal.num_speculative_tokens,
        proposal.lookahead,
        proposal.max_nodes,
    )
    end_len = min(proposal.max_len, terms.prompt_len + terms.parameters.max_tokens)
    return TreeSizes(
        num_nodes=min(max_nodes or lookahead, lookahead) if lookahead else max_nodes or num,
        depth=max(0, min(lookahead or num, end_len - len(proposal.token_ids))),
        width=1 if is_drafted or 0 < max_nodes <= num else MAX_RANK,
        least_value=_LEAST_VALUE,
        least_probability=0.0 if is_drafted else terms.p_min or 0.0,
        stop_token_ids=terms.stop_token_ids,
    )
