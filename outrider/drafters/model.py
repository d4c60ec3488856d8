"""Drafting with a language model: a small one that shares the target's tokenizer, or the target's own first layers.

The second (self-speculation, drafter `layers`) is the same drafter on a checkpoint of which only the first `num_layers`
layers, the final norm and the head are loaded.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.drafters.branches import SessionCaches
from outrider.drafters.cached_tokens import CachedTokens
from outrider.drafters.choice import ChoiceOptions, choose
from outrider.drafters.drafter import Drafter, DrafterInfo, OpenProposal
from outrider.drafters.growth import Growth, GrowthOptions, new_growth, num_nodes
from outrider.drafters.options import DrafterOptions
from outrider.drafters.running import MAX_WIDTH, RunningTree
from outrider.drafters.shares import share_rows
from outrider.drafters.states import BoundedStates
from outrider.drafters.step_budget import Frontier, StepBudget
from outrider.errors import Overloaded
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.lm.loading import LoadOptions, load_model
from outrider.lm.model import LanguageModel, SessionStep
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, TokenSpan


@dataclass(frozen=True, slots=True)
class ModelDrafterOptions:
    """Limits of a model drafter.

    Attributes:
        kv_budget_bytes: KV cache of all sessions together.
        prefill_chunk_len: rows of one pass over all sessions; every session that is waited for has at least one.
        max_session_len: longest session in tokens; the model's own limit may be lower.
        choice: how nodes are chosen.
        tree_nodes: nodes of a proposal that does not say how many it may have; 0 for chains.
    """

    kv_budget_bytes: int
    prefill_chunk_len: int
    max_session_len: int
    choice: ChoiceOptions
    tree_nodes: int = 0


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


@dataclass(frozen=True, slots=True)
class _Pending:
    """What a proposal wants of the next pass: its text's missing positions, or else nodes of its tree."""

    proposal: OpenProposal
    caches: SessionCaches
    missing: range
    frontier: Frontier | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A step of a pass, the cache that it extends, and the node that it runs, where it is one."""

    part: _Pending
    step: SessionStep
    cached: CachedTokens
    number: int | None = None


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
        self._caches = BoundedStates(lambda: SessionCaches(CachedTokens(model.new_cache())), options.kv_budget_bytes)
        self._info = _describe(model, options, kind)
        self._growth = GrowthOptions(options.tree_nodes, options.choice.top_k, options.choice.p_min)
        size = model.info.vocabulary_size
        self._vocabulary = DraftVocabulary(torch.arange(size), size)
        self._trees: dict[OpenProposal, _Tree] = {}
        self._budget = StepBudget(options.prefill_chunk_len, model.info.pass_sizes)

    @property
    def info(self) -> DrafterInfo:
        """Identity and limits."""
        return self._info

    @property
    def used_bytes(self) -> int:
        """Memory of the KV caches, in bytes."""
        return self._caches.used_bytes

    @property
    def num_rows_alone(self) -> int:
        """Rows that the last step would have had for one of its sessions that run ahead alone."""
        return self._budget.num_rows_alone

    def step(self, proposals: Sequence[OpenProposal]) -> int:
        """Runs one pass: a chunk of what each proposal's cache is missing, and a node where nothing is missing then.

        Of proposals that run ahead it runs the nodes worth most; see `outrider.drafters.step_budget`.
        """
        started_s = time.perf_counter()
        active = set(proposals)
        self._trees = {item: tree for item, tree in self._trees.items() if item in active}
        pending = [part for proposal in self._admit(proposals) if (part := self._pending(proposal)) is not None]
        shares = share_rows([len(part.missing) for part in pending], self._options.prefill_chunk_len)
        rows = [row for part, share in zip(pending, shares, strict=True) for row in self._text_rows(part, share)]
        rows += self._branch_rows([part for part in pending if part.frontier is not None], rows)
        if rows:
            self._run(rows)
            self._note_time(rows, time.perf_counter() - started_s)
        for proposal in proposals:
            self._settle(proposal)
        return sum(row.step.num_rows for row in rows)

    def advance(self, proposal: OpenProposal, token_ids: Sequence[int]) -> bool:
        """Goes on below the text where the proposal's tree has it."""
        caches = self._caches.find(proposal.session_id)
        tree = caches.tree if caches is not None else None
        if caches is None or tree is None or tree.proposal is not proposal or proposal.lookahead_nodes == 0:
            return False
        if not tree.follow(token_ids):
            return False
        caches.advance(tree.root, tree.parent(tree.root), tree.is_live)
        proposal.complete = False
        self._settle(proposal)
        return True

    def end(self, proposal: OpenProposal) -> None:
        """Forgets the proposal's branches; what is cached of the text is kept."""
        caches = self._caches.find(proposal.session_id)
        if caches is not None and caches.tree is not None and caches.tree.proposal is proposal:
            caches.end()
            self._caches.weigh(proposal.session_id)

    def truncate(self, session_id: str, length: int) -> None:
        """Keeps the KV cache: what of it is right is found out when the session drafts again."""
        if (caches := self._caches.find(session_id)) is not None:
            caches.text.disagree(length)

    def forget(self, session_id: str) -> None:
        """Drops the session's KV cache."""
        self._caches.forget(session_id)

    def _session(self, proposal: OpenProposal) -> SessionCaches:
        salt = proposal.terms.cache_salt
        return self._caches.use(proposal.session_id, lambda: SessionCaches(CachedTokens(self._model.new_cache(salt))))

    def _pending(self, proposal: OpenProposal) -> _Pending | None:
        """Returns what the next pass runs for a proposal; None where there is nothing."""
        caches = self._session(proposal)
        if not proposal.lookahead_nodes:
            if caches.tree is not None:
                caches.end()
            return _Pending(proposal, caches, caches.text.missing(proposal))
        tree = caches.tree
        if tree is None or tree.proposal is not proposal:
            if proposal.nodes:
                # Its branches had to make room. What was sent stands; more comes under the next base.
                proposal.complete = True
                return None
            caches.end()
            tree = caches.tree = RunningTree(proposal, self._growth, self._vocabulary, caches.rates)
        if not tree.has_run_root:
            return _Pending(proposal, caches, caches.text.missing(proposal, len(proposal.token_ids)))
        nodes = tree.frontier()
        return _Pending(proposal, caches, range(0), Frontier(nodes, tree.is_awaited)) if nodes else None

    def _text_rows(self, part: _Pending, share: int) -> list[_Row]:
        """Returns the step of a pass that runs one proposal's text, of so many rows at most."""
        if not part.missing:
            return []
        proposal, start = part.proposal, part.missing.start
        span = TokenSpan(start, proposal.slice(start, start + share))
        is_end = span.end == part.missing.stop
        tree = ProposalTree() if proposal.lookahead_nodes else self._tree_to_run(proposal, span)
        # Before any branch takes its memory.
        if not part.caches.text.kv_cache.reserve(span, tree):
            proposal.refuse(_no_memory())
            return []
        return [_Row(part, SessionStep(part.caches.text.kv_cache, span, tree, is_end), part.caches.text)]

    def _branch_rows(self, parts: Sequence[_Pending], others: Sequence[_Row]) -> list[_Row]:
        """Returns a step for each node that a pass runs beside these others, and for which there is memory."""
        num_ends = sum(row.step.wants_logits for row in others)
        frontiers = [part.frontier for part in parts if part.frontier is not None]
        chosen = self._budget.choose(frontiers, num_ends, sum(row.step.num_rows for row in others))
        rows: list[_Row] = []
        beside: list[tuple[_Pending, RunningTree, int]] = []
        # Branches go on before others leave them: where memory is short, the main lines have it.
        for part, numbers in zip(parts, chosen, strict=True):
            caches, tree = part.caches, part.caches.tree
            assert tree is not None
            for number in numbers:
                cached = caches.enter(number, tree.parent(number), tree.position(number))
                if cached is None:
                    beside.append((part, tree, number))
                else:
                    self._add_row(part, tree, number, cached, rows)
        for part, tree, number in beside:
            cached = part.caches.fork(number, tree.parent(number), tree.position(number))
            self._add_row(part, tree, number, cached, rows)
        return rows

    def _add_row(self, part: _Pending, tree: RunningTree, number: int, cached: CachedTokens, rows: list[_Row]) -> None:
        span, nothing = TokenSpan(tree.position(number), (tree.token_id(number),)), ProposalTree()
        if cached.kv_cache.reserve(span, nothing):
            rows.append(_Row(part, SessionStep(cached.kv_cache, span, nothing), cached, number))
        else:
            part.caches.leave(number)
            tree.give_up(number)

    def _note_time(self, rows: Sequence[_Row], duration_s: float) -> None:
        """Learns what a step took, where it is like those that make nodes."""
        if all(row.step.wants_logits and len(row.step.span.token_ids) <= MAX_WIDTH for row in rows):
            self._budget.observe(duration_s, sum(row.step.num_rows for row in rows))

    def _run(self, rows: Sequence[_Row]) -> None:
        outputs = self._model.forward([row.step for row in rows])
        expanded: dict[RunningTree, list[tuple[int, torch.Tensor]]] = {}
        for row, logits in zip(rows, outputs, strict=True):
            proposal, caches = row.part.proposal, row.part.caches
            row.cached.kv_cache.keep(())
            row.cached.extend(row.step.span.token_ids)
            self._caches.weigh(proposal.session_id)
            if not row.step.wants_logits:
                continue
            if caches.tree is None:
                self._grow(proposal, caches.text, logits)
            elif row.number is not None:
                expanded.setdefault(caches.tree, []).append((row.number, logits))
            else:
                caches.plant(caches.tree.root)
                expanded.setdefault(caches.tree, []).append((caches.tree.root, logits))
        for tree, found in expanded.items():
            tree.expand([number for number, _ in found], torch.cat([logits for _, logits in found]))

    def _settle(self, proposal: OpenProposal) -> None:
        """Completes a proposal that runs ahead once there is nothing to run for it."""
        caches = self._caches.find(proposal.session_id)
        if proposal.lookahead_nodes and caches is not None and caches.tree is not None:
            proposal.complete = proposal.complete or (caches.tree.has_run_root and not caches.tree.frontier())

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
            fits = self._caches.make_room(needed_bytes + more_bytes, in_use)
            if not fits and self._cut_branches(proposals):
                fits = self._caches.make_room(needed_bytes + more_bytes, in_use)
            if fits:
                needed_bytes += more_bytes
                admitted.append(proposal)
            else:
                in_use.discard(proposal.session_id)
                proposal.refuse(_no_memory())
        return admitted

    def _cut_branches(self, proposals: Sequence[OpenProposal]) -> bool:
        """Drops what runs ahead: no session's guesses keep another's text from being run. Returns whether any did."""
        was_any = False
        for proposal in proposals:
            caches = self._caches.find(proposal.session_id)
            if caches is not None and caches.tree is not None:
                caches.end()
                self._caches.weigh(proposal.session_id)
                was_any = True
        return was_any

    def _missing_bytes(self, proposal: OpenProposal) -> int:
        caches = self._caches.find(proposal.session_id)
        cache = caches.text.kv_cache if caches else self._model.new_cache()
        return cache.missing_bytes(len(proposal.token_ids) + num_nodes(proposal, self._growth))


def load_model_drafter(settings: DrafterOptions) -> ModelDrafter:
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


def _no_memory() -> Overloaded:
    return Overloaded("the KV caches of the sessions that draft now fill the budget")


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
