"""Drafting with a language model: a small one that shares the target's tokenizer, or the target's own first layers.

The second (self-speculation, drafter `layers`) is the same drafter on a checkpoint of which only the first `num_layers`
layers, the final norm and the head are loaded.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.drafters.choice import ChoiceOptions, choose
from draft_service.drafters.drafter import Drafter, DrafterInfo, OpenProposal
from draft_service.drafters.growth import Growth, GrowthOptions, new_growth, num_nodes
from draft_service.drafters.shares import share_rows
from draft_service.drafters.states import BoundedStates
from draft_service.settings import DraftSettings
from outrider.errors import Overloaded
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.lm.loading import LoadOptions, load_model
from outrider.lm.model import KVCache, LanguageModel, SessionStep
from outrider.sampling import TokenHistory
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, TokenSpan


@dataclass(frozen=True, slots=True)
class ModelDrafterOptions:
    """Limits of a model drafter.

    Attributes:
        kv_budget_bytes: KV cache of all sessions together.
        prefill_chunk_len: rows of one pass over all sessions; every session has at least one.
        max_session_len: longest session in tokens; the model's own limit may be lower.
        choice: how nodes are chosen.
        tree_nodes: nodes of a proposal that does not say how many it may have; 0 for chains.
    """

    kv_budget_bytes: int
    prefill_chunk_len: int
    max_session_len: int
    choice: ChoiceOptions
    tree_nodes: int = 0


class CachedTokens:
    """A KV cache, and which tokens it holds: a session's, and behind them drafted ones that may yet be accepted."""

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self._token_ids = array("I")
        self._agreed_len = 0
        self._history: tuple[OpenProposal, TokenHistory] | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self.kv_cache.num_bytes

    def release(self) -> None:
        """Gives the KV cache's memory back."""
        self.kv_cache.release()

    def disagree(self, length: int) -> None:
        """Learns that the session's tokens from position `length` on may be others than these."""
        self._agreed_len = min(self._agreed_len, length)

    def missing(self, proposal: OpenProposal) -> range:
        """Keeps what is cached of the proposal, drops the rest; returns the positions still to be run, at least one."""
        known_len = min(len(self._token_ids), proposal.len - 1)
        while self._agreed_len < known_len and self._token_ids[self._agreed_len] == proposal.token_id(self._agreed_len):
            self._agreed_len += 1
        self._agreed_len = min(self._agreed_len, known_len)
        if self._agreed_len < len(self._token_ids):
            del self._token_ids[self._agreed_len :]
            self.kv_cache.truncate(self._agreed_len)
        if self._agreed_len < len(proposal.token_ids) - 1 and self.kv_cache.adopt(proposal.token_ids):
            # Another session of the same beginning has run it.
            self._token_ids = array("I", proposal.token_ids[: self.kv_cache.cached_len])
            self._agreed_len = len(self._token_ids)
        return range(self._agreed_len, proposal.len)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Learns that a pass has cached these tokens too."""
        self._token_ids.extend(token_ids)
        self._agreed_len = len(self._token_ids)

    def history(self, proposal: OpenProposal) -> TokenHistory:
        """Returns the tokens of session and proposal, as penalties need them; the session's are gone through once."""
        if self._history is None or self._history[0] is not proposal:
            prompt_len = proposal.terms.prompt_len
            prompt, output = proposal.token_ids[:prompt_len], proposal.token_ids[prompt_len:]
            self._history = proposal, TokenHistory(prompt, output, proposal.terms.parameters)
        return self._history[1].extended([node.token_id for node in proposal.nodes])


class _Tree:
    """A proposal's tree while it grows, and the part of it that has been run.

    Every pass runs that part again behind the session's last token: so no cache holds more than the session.
    """

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self.nodes = ProposalTree()
        self._numbers = {ROOT: ROOT}

    def enter_frontier(self) -> list[int]:
        """Adds the frontier to the nodes that are run; returns which of them it is."""
        for number in self.growth.frontier:
            if number not in self._numbers:
                parent = self._numbers[self.growth.parent(number)]
                node = ProposalNode(parent, self.growth.token_id(number), NodeKind.GUESSED)
                self._numbers[number] = self.nodes.append(node)
        return [self._numbers[number] for number in self.growth.frontier]


class ModelDrafter(Drafter):
    """A `Drafter` that runs a language model: one batched pass a step, in which each session gets its next nodes.

    Args:
        model: shares the targets' vocabulary.
        options: limits.
        kind: what the drafter calls itself: model or layers.
    """

    def __init__(self, model: LanguageModel, options: ModelDrafterOptions, kind: str = "model") -> None:
        self._model = model
        self._options = options
        self._caches = BoundedStates(lambda: CachedTokens(model.new_cache()), options.kv_budget_bytes)
        self._info = _describe(model, options, kind)
        self._growth = GrowthOptions(options.tree_nodes, options.choice.top_k, options.choice.p_min)
        size = model.info.vocabulary_size
        self._vocabulary = DraftVocabulary(torch.arange(size), size)
        self._trees: dict[OpenProposal, _Tree] = {}

    @property
    def info(self) -> DrafterInfo:
        """Identity and limits."""
        return self._info

    @property
    def used_bytes(self) -> int:
        """Memory of the KV caches, in bytes."""
        return self._caches.used_bytes

    def step(self, proposals: Sequence[OpenProposal]) -> int:
        """Runs one pass: a chunk of what each proposal's cache is missing, and a node where nothing is missing then."""
        active = set(proposals)
        self._trees = {item: tree for item, tree in self._trees.items() if item in active}
        admitted = self._admit(proposals)
        missing = [self._cached(proposal).missing(proposal) for proposal in admitted]
        shares = share_rows([len(positions) for positions in missing], self._options.prefill_chunk_len)
        spans = [
            TokenSpan(positions.start, proposal.slice(positions.start, positions.start + share))
            for proposal, positions, share in zip(admitted, missing, shares, strict=True)
        ]
        if admitted:
            self._run(admitted, spans)
        return sum(shares)

    def truncate(self, session_id: str, length: int) -> None:
        """Keeps the KV cache: what of it is right is found out when the session drafts again."""
        if (cached := self._caches.find(session_id)) is not None:
            cached.disagree(length)

    def forget(self, session_id: str) -> None:
        """Drops the session's KV cache."""
        self._caches.forget(session_id)

    def _cached(self, proposal: OpenProposal) -> CachedTokens:
        salt = proposal.terms.cache_salt
        return self._caches.use(proposal.session_id, lambda: CachedTokens(self._model.new_cache(salt)))

    def _run(self, proposals: Sequence[OpenProposal], spans: Sequence[TokenSpan]) -> None:
        caches = [self._caches.use(proposal.session_id) for proposal in proposals]
        steps = [
            SessionStep(cached.kv_cache, span, self._tree_to_run(proposal, span), span.end == proposal.len)
            for proposal, cached, span in zip(proposals, caches, spans, strict=True)
        ]
        outputs = self._model.forward(steps)
        for proposal, cached, step, logits in zip(proposals, caches, steps, outputs, strict=True):
            cached.kv_cache.keep(())
            cached.extend(step.span.token_ids)
            self._caches.weigh(proposal.session_id)
            if step.wants_logits:
                self._grow(proposal, cached, logits)

    def _tree_to_run(self, proposal: OpenProposal, span: TokenSpan) -> ProposalTree:
        tree = self._trees.get(proposal)
        if tree is None or span.end < proposal.len:
            return ProposalTree()
        tree.enter_frontier()
        return tree.nodes

    def _grow(self, proposal: OpenProposal, cached: CachedTokens, logits: torch.Tensor) -> None:
        if self._wants_tree(proposal):
            self._grow_tree(proposal, logits)
            return
        choice = choose(logits[0], proposal, cached.history(proposal), self._options.choice)
        if choice is None:
            proposal.complete = True
        else:
            proposal.append(*choice)

    def _wants_tree(self, proposal: OpenProposal) -> bool:
        """Whether the proposal is to be more than a chain."""
        return num_nodes(proposal, self._growth) > proposal.num_speculative_tokens

    def _grow_tree(self, proposal: OpenProposal, logits: torch.Tensor) -> None:
        tree = self._trees.get(proposal)
        if tree is None:
            tree = self._trees[proposal] = _Tree(new_growth(proposal, self._growth, self._vocabulary))
        tree.growth.grow(logits[tree.enter_frontier()])
        if not tree.growth.frontier:
            proposal.fill(tree.growth.nodes())
            del self._trees[proposal]

    def _admit(self, proposals: Sequence[OpenProposal]) -> list[OpenProposal]:
        """Makes room for the proposals' KV caches; refuses those for which there is none."""
        admitted: list[OpenProposal] = []
        in_use = {proposal.session_id for proposal in proposals}
        needed_bytes = 0
        for proposal in proposals:
            more_bytes = self._missing_bytes(proposal)
            if self._caches.make_room(needed_bytes + more_bytes, in_use):
                needed_bytes += more_bytes
                admitted.append(proposal)
            else:
                in_use.discard(proposal.session_id)
                proposal.refuse(Overloaded("the KV caches of the sessions that draft now fill the budget"))
        return admitted

    def _missing_bytes(self, proposal: OpenProposal) -> int:
        cached = self._caches.find(proposal.session_id)
        cache = cached.kv_cache if cached else self._model.new_cache()
        return cache.missing_bytes(len(proposal.token_ids) + num_nodes(proposal, self._growth))


def load_model_drafter(settings: DraftSettings) -> ModelDrafter:
    """Returns the drafter over the model that the settings name, or over its first `num_layers` layers.

    Raises:
        InvalidArgument: a value is not understood.
        ModelUnsupported: the model cannot be loaded, or its KV cache cannot roll back.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    load = LoadOptions(
        dtype=settings.dtype,
        device=settings.device,
        quantization=settings.quantization,
        num_layers=settings.num_layers,
        kv_budget_bytes=settings.kv_budget_bytes,
        compiles=settings.compile,
        trims=True,
    )
    loaded = load_model(settings.model, load)
    options = ModelDrafterOptions(
        kv_budget_bytes=settings.kv_budget_bytes,
        prefill_chunk_len=settings.prefill_chunk_len,
        max_session_len=settings.max_session_len,
        choice=ChoiceOptions(top_k=settings.draft_top_k, p_min=settings.draft_p_min),
        tree_nodes=settings.tree_nodes,
    )
    return ModelDrafter(loaded.model, options, settings.drafter.value)


def _describe(model: LanguageModel, options: ModelDrafterOptions, kind: str) -> DrafterInfo:
    info = model.info
    return DrafterInfo(
        drafter=kind,
        model=info.name,
        model_fingerprint=info.fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        numerics=info.numerics,
        vocabulary_size=info.vocabulary_size,
        max_session_len=min(info.max_session_len, options.max_session_len),
        eos_token_ids=info.eos_token_ids,
    )
