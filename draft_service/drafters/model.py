"""Drafting with a language model: a small one that shares the target's tokenizer, or the target's own first layers.

The second (self-speculation, drafter `layers`) is the same drafter on a checkpoint of which only the first `num_layers`
layers, the final norm and the head are loaded.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.drafters.choice import ChoiceOptions, choose
from draft_service.drafters.drafter import Branch, DrafterInfo
from draft_service.drafters.states import BoundedStates
from draft_service.settings import DraftSettings
from outrider.errors import Overloaded
from outrider.lm.loading import load_model
from outrider.lm.model import KVCache, LanguageModel, SessionStep
from outrider.sampling import TokenHistory
from outrider.tokens import TokenSpan


@dataclass(frozen=True, slots=True)
class ModelDrafterOptions:
    """Limits of a model drafter.

    Attributes:
        kv_budget_bytes: KV cache of all sessions together.
        prefill_chunk_len: rows of one pass over all sessions; every session has at least one.
        max_session_len: longest session in tokens; the model's own limit may be lower.
        choice: how nodes are chosen.
    """

    kv_budget_bytes: int
    prefill_chunk_len: int
    max_session_len: int
    choice: ChoiceOptions


class CachedTokens:
    """A KV cache, and which tokens it holds: a session's, and behind them drafted ones that may yet be accepted."""

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self._token_ids = array("I")
        self._agreed_len = 0
        self._history: tuple[Branch, TokenHistory] | None = None

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

    def missing(self, branch: Branch) -> range:
        """Keeps what is cached of the branch, drops the rest; returns the positions still to be run, at least one."""
        known_len = min(len(self._token_ids), branch.len - 1)
        while self._agreed_len < known_len and self._token_ids[self._agreed_len] == branch.token_id(self._agreed_len):
            self._agreed_len += 1
        self._agreed_len = min(self._agreed_len, known_len)
        if self._agreed_len < len(self._token_ids):
            del self._token_ids[self._agreed_len :]
            self.kv_cache.truncate(self._agreed_len)
        if self._agreed_len < len(branch.token_ids) - 1 and self.kv_cache.adopt(branch.token_ids):
            # Another session of the same beginning has run it.
            self._token_ids = array("I", branch.token_ids[: self.kv_cache.cached_len])
            self._agreed_len = len(self._token_ids)
        return range(self._agreed_len, branch.len)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Learns that a pass has cached these tokens too."""
        self._token_ids.extend(token_ids)
        self._agreed_len = len(self._token_ids)

    def history(self, branch: Branch) -> TokenHistory:
        """Returns the tokens of session and branch, as penalties need them; the session's are gone through once."""
        if self._history is None or self._history[0] is not branch:
            prompt_len = branch.terms.prompt_len
            prompt, output = branch.token_ids[:prompt_len], branch.token_ids[prompt_len:]
            self._history = branch, TokenHistory(prompt, output, branch.terms.parameters)
        return self._history[1].extended([node.token_id for node in branch.nodes])


class ModelDrafter:
    """A `Drafter` that runs a language model: one batched pass a step, in which each session gets its next node.

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

    @property
    def info(self) -> DrafterInfo:
        """Identity and limits."""
        return self._info

    @property
    def used_bytes(self) -> int:
        """Memory of the KV caches, in bytes."""
        return self._caches.used_bytes

    def step(self, branches: Sequence[Branch]) -> int:
        """Runs one pass: a chunk of what each branch's cache is missing, and a node where nothing is missing then."""
        admitted = self._admit(branches)
        missing = [self._cached(branch).missing(branch) for branch in admitted]
        shares = share_rows([len(positions) for positions in missing], self._options.prefill_chunk_len)
        spans = [
            TokenSpan(positions.start, branch.slice(positions.start, positions.start + share))
            for branch, positions, share in zip(admitted, missing, shares, strict=True)
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

    def _cached(self, branch: Branch) -> CachedTokens:
        salt = branch.terms.cache_salt
        return self._caches.use(branch.session_id, lambda: CachedTokens(self._model.new_cache(salt)))

    def _run(self, branches: Sequence[Branch], spans: Sequence[TokenSpan]) -> None:
        caches = [self._caches.use(branch.session_id) for branch in branches]
        steps = [
            SessionStep(cached.kv_cache, span, wants_logits=span.end == branch.len)
            for branch, cached, span in zip(branches, caches, spans, strict=True)
        ]
        outputs = self._model.forward(steps)
        for branch, cached, step, logits in zip(branches, caches, steps, outputs, strict=True):
            cached.extend(step.span.token_ids)
            self._caches.weigh(branch.session_id)
            if step.wants_logits:
                self._grow(branch, logits[0], cached.history(branch))

    def _grow(self, branch: Branch, logits: torch.Tensor, history: TokenHistory) -> None:
        choice = choose(logits, branch, history, self._options.choice)
        if choice is None:
            branch.complete = True
        else:
            branch.append(*choice)

    def _admit(self, branches: Sequence[Branch]) -> list[Branch]:
        """Makes room for the branches' KV caches; refuses those for which there is none."""
        admitted: list[Branch] = []
        in_use = {branch.session_id for branch in branches}
        needed_bytes = 0
        for branch in branches:
            more_bytes = self._missing_bytes(branch)
            if self._caches.make_room(needed_bytes + more_bytes, in_use):
                needed_bytes += more_bytes
                admitted.append(branch)
            else:
                in_use.discard(branch.session_id)
                branch.refuse(Overloaded("the KV caches of the sessions that draft now fill the budget"))
        return admitted

    def _missing_bytes(self, branch: Branch) -> int:
        cached = self._caches.find(branch.session_id)
        cache = cached.kv_cache if cached else self._model.new_cache()
        return cache.missing_bytes(len(branch.token_ids) + branch.num_speculative_tokens)


def share_rows(wanted: Sequence[int], num_rows: int) -> list[int]:
    """Returns how many rows of a pass each session gets: what it wants, or an even share of what the others leave.

    Args:
        wanted: rows that each session could use, at least 1.
        num_rows: rows to share; exceeded where sessions are more than rows, since each gets at least 1.
    """
    shares = [0] * len(wanted)
    by_size = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for num_served, index in enumerate(by_size):
        even = max(1, num_rows // (len(wanted) - num_served))
        shares[index] = min(wanted[index], even)
        num_rows -= shares[index]
    return shares


def load_model_drafter(settings: DraftSettings) -> ModelDrafter:
    """Returns the drafter over the model that the settings name, or over its first `num_layers` layers.

    Raises:
        InvalidArgument: a value is not understood.
        ModelUnsupported: the model cannot be loaded, or its KV cache cannot roll back.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    loaded = load_model(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        quantization=settings.quantization,
        num_layers=settings.num_layers,
        kv_budget_bytes=settings.kv_budget_bytes,
        compiles=settings.compile,
        trims=True,
    )
    options = ModelDrafterOptions(
        kv_budget_bytes=settings.kv_budget_bytes,
        prefill_chunk_len=settings.prefill_chunk_len,
        max_session_len=settings.max_session_len,
        choice=ChoiceOptions(top_k=settings.draft_top_k, p_min=settings.draft_p_min),
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
