"""Drafting with a language model: a small one that shares the target's tokenizer, or the target's own first layers.

The second (self-speculation, drafter `layers`) is the same drafter on a checkpoint of which only the first `num_layers`
layers, the final norm and the head are loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.control.pass_times import PassTimes
from outrider.drafters.branches import SessionCaches
from outrider.drafters.cached_tokens import CachedTokens
from outrider.drafters.choices import TreeOptions
from outrider.drafters.drafter import Drafter, DrafterInfo, OpenProposal, StepRows
from outrider.drafters.node_values import NodeValues
from outrider.drafters.options import DrafterOptions
from outrider.drafters.shares import PREFILL_CHUNK_LEN, share_rows
from outrider.drafters.states import BoundedStates
from outrider.drafters.step_budget import Frontier, StepBudget
from outrider.drafters.tree import DraftTree, root_tree
from outrider.drafters.tree_order import Node
from outrider.errors import Overloaded
from outrider.grammar.compiler import GrammarCompiler
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.model import LanguageModel, SessionStep
from outrider.lm.tokenizer import TOKENIZER_NAME
from outrider.speculation.proposal_tree import Candidate
from outrider.tokens import ProposalTree, TokenSpan


@dataclass(frozen=True, slots=True)
class ModelDrafterOptions:
    """Limits of a model drafter.

    Attributes:
        kv_budget_bytes: KV cache of all sessions together.
        prefill_chunk_len: rows of one pass over all sessions; every session whose target waits has at least one.
        max_session_len: longest session in tokens; the model's own limit may be lower.
        tree: of its trees.
    """

    kv_budget_bytes: int
    prefill_chunk_len: int
    max_session_len: int
    tree: TreeOptions


@dataclass(frozen=True, slots=True)
class _Pending:
    """The rows of a proposal for the next pass: its text's missing positions, or else nodes of its tree."""

    tree: DraftTree
    caches: SessionCaches
    missing: range
    frontier: Sequence[tuple[float, Node]] = ()


@dataclass(frozen=True, slots=True)
class _Row:
    """A step of a pass, the cache that it extends, and the node that it runs; the root where it runs the text."""

    part: _Pending
    step: SessionStep
    cached: CachedTokens
    node: Node


class ModelDrafter(Drafter):
    """A `Drafter` that runs a language model: one batched pass a step, in which each session gets its next nodes.

    Args:
        model: shares the targets' vocabulary.
        options: limits.
        kind: its name: model or layers.
    """

    def __init__(self, model: LanguageModel, options: ModelDrafterOptions, kind: str = "model") -> None:
        self._model = model
        self._options = options
        self._caches = BoundedStates(lambda: SessionCaches(CachedTokens(model.new_cache())), options.kv_budget_bytes)
        self._info = _describe(model, options, kind)
        size = model.info.vocabulary_size
        self._vocabulary = DraftVocabulary(torch.arange(size), size)
        self._node_values = NodeValues.of_all_sessions()
        self.times = PassTimes(model.info.padded_sizes)
        self._budget = StepBudget(options.prefill_chunk_len, self.times)

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

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        """Run one pass: a chunk of the tokens that each proposal's cache lacks, or nodes of its tree.

        Of proposals that run ahead the nodes worth most are run; see `outrider.drafters.step_budget`.
        """
        pending = [part for proposal in self._admit(proposals) if (part := self._pending(proposal)) is not None]
        texts = [part for part in pending if part.missing]
        num_musts = sum(_frontier(part).num_musts for part in pending)
        shares = share_rows([len(part.missing) for part in texts], self._options.prefill_chunk_len - num_musts)
        rows = [row for part, share in zip(texts, shares, strict=True) for row in self._text_rows(part, share)]
        rows += self._branch_rows([part for part in pending if part.frontier], rows)
        if rows:
            self._run(rows)
        for proposal in proposals:
            self._settle(proposal)
        texts_run = [(row.step.num_rows, row.step.span.start) for row in rows if row.node is row.part.tree.root]
        return StepRows.of(len(rows) - len(texts_run), texts_run)

    def advance(self, proposal: OpenProposal, token_ids: Sequence[int]) -> bool:
        """Go on below the text where the proposal's tree has it; else keep the part that was run."""
        caches = self._caches.find(proposal.session_id)
        tree = caches.tree if caches is not None else None
        if caches is None or tree is None or tree.proposal is not proposal:
            return False
        before, goes_on = tree.root, tree.follow(token_ids)
        if tree.root is not before and tree.root.parent is not None:
            caches.advance(tree.root, tree.root.parent, set(tree.live()))
        if not goes_on or not proposal.num_speculative_tokens:
            return False
        proposal.complete = False
        self._settle(proposal)
        return True

    def end(self, proposal: OpenProposal) -> None:
        """Drop the proposal's branches; the cache of the text is kept."""
        caches = self._caches.find(proposal.session_id)
        if caches is not None and caches.tree is not None and caches.tree.proposal is proposal:
            caches.end()
            self._caches.weigh(proposal.session_id)

    def truncate(self, session_id: str, length: int) -> None:
        """Keep the KV cache: it is compared with the session's tokens when the session drafts again."""
        if (caches := self._caches.find(session_id)) is not None:
            caches.text.recheck_from(length)

    def forget(self, session_id: str) -> None:
        """Drop the session's KV cache."""
        self._caches.forget(session_id)

    def _session(self, proposal: OpenProposal) -> SessionCaches:
        salt = proposal.terms.cache_salt
        return self._caches.use(proposal.session_id, lambda: SessionCaches(CachedTokens(self._model.new_cache(salt))))

    def _pending(self, proposal: OpenProposal) -> _Pending | None:
        """Return the rows of the next pass for a proposal; None where there are none."""
        caches = self._session(proposal)
        tree = caches.tree
        if tree is None or tree.proposal is not proposal:
            if proposal.nodes:
                # Its branches were evicted. The nodes that were sent stand; more follow under the next base.
                proposal.complete = True
                return None
            caches.end()
            tree = root_tree(proposal, self._options.tree, self._vocabulary, self._node_values, caches.node_values)
            caches.tree = tree
        if not tree.has_run_root:
            return _Pending(tree, caches, caches.text.missing(proposal.token_ids))
        nodes = tree.frontier()
        return _Pending(tree, caches, range(0), nodes) if nodes else None

    def _text_rows(self, part: _Pending, share: int) -> list[_Row]:
        """Return the step of a pass that runs one proposal's text, of so many rows at most."""
        proposal, start = part.tree.proposal, part.missing.start
        span, nothing = TokenSpan(start, tuple(proposal.token_ids[start : start + share])), ProposalTree()
        # Before any branch takes its memory.
        if not part.caches.text.kv_cache.reserve(span, nothing):
            proposal.refuse(_no_memory())
            return []
        step = SessionStep(part.caches.text.kv_cache, span, nothing, span.end == part.missing.stop)
        return [_Row(part, step, part.caches.text, part.tree.root)]

    def _branch_rows(self, parts: Sequence[_Pending], others: Sequence[_Row]) -> list[_Row]:
        """Return a step for each node that a pass runs beside these others, and for which there is memory."""
        num_ends = sum(row.step.wants_logits for row in others)
        chosen = self._budget.choose(list(map(_frontier, parts)), num_ends, sum(row.step.num_rows for row in others))
        rows: list[_Row] = []
        beside: list[tuple[_Pending, Node]] = []
        # Branches are continued before others are forked: where memory is short, the main lines get it.
        for part, places in zip(parts, chosen, strict=True):
            for _, node in map(part.frontier.__getitem__, places):
                cached = part.caches.continue_with(node, part.tree.position(node))
                if cached is None:
                    beside.append((part, node))
                else:
                    self._add_row(part, node, cached, rows)
        for part, node in beside:
            self._add_row(part, node, part.caches.fork(node, part.tree.position(node)), rows)
        return rows

    def _add_row(self, part: _Pending, node: Node, cached: CachedTokens, rows: list[_Row]) -> None:
        span, nothing = TokenSpan(part.tree.position(node), (node.token_id,)), ProposalTree()
        if cached.kv_cache.reserve(span, nothing):
            rows.append(_Row(part, SessionStep(cached.kv_cache, span, nothing), cached, node))
        else:
            part.caches.withdraw(node)
            part.tree.postpone(node)

    def _run(self, rows: Sequence[_Row]) -> None:
        outputs = self._model.forward([row.step for row in rows])
        expanded: dict[DraftTree, list[tuple[Node, torch.Tensor]]] = {}
        for row, logits in zip(rows, outputs, strict=True):
            tree, caches = row.part.tree, row.part.caches
            row.cached.kv_cache.keep(())
            row.cached.extend(row.step.span.token_ids)
            self._caches.weigh(tree.proposal.session_id)
            if not row.step.wants_logits:
                continue
            if row.node is tree.root:
                caches.set_root(tree.root)
            expanded.setdefault(tree, []).append((row.node, logits))
        for tree, found in expanded.items():
            tree.expand([node for node, _ in found], torch.cat([logits for _, logits in found]))

    def _settle(self, proposal: OpenProposal) -> None:
        """Add the nodes that were made to a proposal, and complete it once there is nothing to run for it."""
        caches = self._caches.find(proposal.session_id)
        tree = caches.tree if caches is not None else None
        if tree is not None and tree.proposal is proposal:
            proposal.nodes += tree.take()
            proposal.complete = proposal.complete or (tree.has_run_root and not tree.frontier())

    def _admit(self, proposals: Sequence[OpenProposal]) -> list[OpenProposal]:
        """Make room for the proposals' KV caches; refuse those for which there is none."""
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
        """Drop the branches that run ahead, so that every session's text can be run; return whether there were any."""
        was_any = False
        for proposal in proposals:
            caches = self._caches.find(proposal.session_id)
            if caches is not None and caches.has_branches:
                caches.end()
                self._caches.weigh(proposal.session_id)
                was_any = True
        return was_any

    def _missing_bytes(self, proposal: OpenProposal) -> int:
        caches = self._caches.find(proposal.session_id)
        cache = caches.text.kv_cache if caches else self._model.new_cache()
        return cache.missing_bytes(len(proposal.token_ids) + proposal.num_speculative_tokens)


def load_model_drafter(settings: DrafterOptions) -> ModelDrafter:
    """Return the drafter over the model that the settings name, or over its first `num_layers` layers.

    Raises:
        InvalidArgument: a value is invalid.
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
        prefill_chunk_len=PREFILL_CHUNK_LEN,
        max_session_len=settings.max_session_len,
        tree=TreeOptions(settings.max_nodes),
    )
    drafter = ModelDrafter(loaded.model, options, settings.drafter.value)
    if loaded.tokenizer is not None:
        info = drafter.info
        definition = loaded.tokenizer.files[TOKENIZER_NAME].decode()
        drafter.compiler = GrammarCompiler(definition, info.vocabulary_size, info.eos_token_ids)
    return drafter


def _frontier(part: _Pending) -> Frontier:
    """Return nodes by their places; those that a target waits for are run whatever other sessions have."""
    nodes = [Candidate(place, value) for place, (value, _) in enumerate(part.frontier)]
    return Frontier(nodes, len(nodes) if part.tree.waits else int(part.tree.is_awaited))


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
