"""What the engine needs of a drafter. Nothing here needs a model library."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.errors import OutriderError
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import FeatureSpan, NodeKind, ProposalNode, SparseDistribution


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """Identity and limits of a drafter.

    Attributes:
        drafter: its kind: ngram, model, layers, eagle3 or medusa.
        model: as configured; the drafter's kind where there is no model.
        model_fingerprint: SHA-256 over the model's configuration and weights; empty where there is no model.
        tokenizer_fingerprint: SHA-256 over the vocabulary; empty where any vocabulary fits.
        numerics: what decides the bits of a logit; empty where there are none.
        vocabulary_size: token ids are below it.
        max_session_len: longest session, in tokens.
        eos_token_ids: the model's end-of-text tokens.
        feature_layers: layers of the target whose features it is made of.
        hidden_size: H of one of these features; 0 where there are none.
        target_fingerprint: of the one target that it was made for; empty where that is not known.
    """

    drafter: str
    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    numerics: str
    vocabulary_size: int
    max_session_len: int
    eos_token_ids: tuple[int, ...] = ()
    feature_layers: tuple[int, ...] = ()
    hidden_size: int = 0
    target_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class DraftTerms:
    """What a session fixes for all its proposals when it is opened.

    Attributes:
        parameters: the request's sampling parameters; the draft's own law follows them too.
        acceptance_rule: the rule that will judge the proposals.
        prompt_len: length of the session when the request's output begins.
        stop_token_ids: token ids beyond which a proposal is of no use.
        cache_salt: sessions of the same salt may share KV cache.
        p_min: probability below which a branch ends; None for the drafter's own.
    """

    parameters: SamplingParameters
    acceptance_rule: AcceptanceRule
    prompt_len: int
    stop_token_ids: frozenset[int]
    cache_salt: bytes = b""
    p_min: float | None = None


@dataclass(slots=True, eq=False)
class OpenProposal:
    """What is being drafted for one session; a drafter appends to it, step by step, or fills it at once.

    Invariants: `token_ids` changes by `Drafter.advance` only; no node is added to a complete proposal.

    Attributes:
        session_id: the session.
        token_ids: the session's tokens.
        terms: what the session was opened with.
        num_speculative_tokens: most nodes from the base to a leaf, where it does not run ahead.
        max_nodes: most nodes below the text; 0 leaves it to the drafter.
        lookahead: most nodes below the text, where it runs ahead of the target's verdicts; else 0.
        max_len: tokens of the longest session.
        nodes: the nodes so far, since it was planted.
        complete: whether nothing more will be drafted before the session has more tokens.
        planted_len: tokens that the session had when it was planted; node numbers count from there.
        refusal: why the drafter cannot draft here, where it cannot.
        missing_features_from: the session position of the first feature without which it cannot go on; None while it
            can. Until features come, `step` is not called for it.
    """

    session_id: str
    token_ids: Sequence[int]
    terms: DraftTerms
    num_speculative_tokens: int
    max_nodes: int = 0
    lookahead: int = 0
    max_len: int = 1 << 31
    nodes: list[ProposalNode] = field(default_factory=list)
    complete: bool = False
    refusal: OutriderError | None = None
    missing_features_from: int | None = None
    planted_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.planted_len = len(self.token_ids)
        self.complete = self.complete or self.num_speculative_tokens <= 0

    def token_id(self, position: int) -> int:
        """Returns the token at that session position, drafted ones of a chain included."""
        known_len = len(self.token_ids)
        return self.token_ids[position] if position < known_len else self.nodes[position - known_len].token_id

    def append(self, token_id: int, law: SparseDistribution | None = None) -> None:
        """Adds a drafted node; the proposal is complete with a stop token, or when it has all its nodes."""
        self.nodes.append(ProposalNode(len(self.nodes), token_id, NodeKind.DRAFTED, law))
        most = max(self.num_speculative_tokens, self.lookahead)
        full = len(self.nodes) >= (min(most, self.max_nodes) if self.max_nodes else most)
        self.complete = full or token_id in self.terms.stop_token_ids

    def fill(self, nodes: Sequence[ProposalNode]) -> None:
        """Adds all nodes there will be, parents before their children."""
        self.nodes.extend(nodes)
        self.complete = True

    def refuse(self, error: OutriderError) -> None:
        """Ends the proposal with an error."""
        self.refusal = error
        self.complete = True


class Drafter(Protocol):
    """Drafts for many sessions at once. All calls come from one thread.

    What it keeps of a session (an index, a KV cache) is its own to drop at any time: it can be made again from a
    proposal's tokens, and changes no proposal. Which token is drafted behind which follows from the session's tokens,
    its terms and the drafter's configuration alone, so that a lookup is a point mass under `rejection`; how many nodes
    a tree has where may follow from what was measured before.
    """

    @property
    def info(self) -> DrafterInfo:
        """Identity and limits."""

    @property
    def used_bytes(self) -> int:
        """Memory kept for sessions, in bytes."""

    @property
    def num_rows_alone(self) -> int:
        """Rows that the last step would have had for one of its sessions alone; 0 where it had as many for each."""
        return 0

    def step(self, proposals: Sequence[OpenProposal]) -> int:
        """Brings each proposal forward by up to one pass: appends nodes, completes it, or refuses it.

        A step that adds no node to an incomplete proposal has brought it nearer to one (as a prefill chunk does), or
        that one's main line is as long as is asked for, and others' nodes are worth more.

        Returns:
            Tokens run through the model, drafted ones included.
        """

    def truncate(self, session_id: str, length: int) -> None:
        """Learns that the session's tokens from position `length` on are no longer what they were."""

    def advance(self, proposal: OpenProposal, token_ids: Sequence[int]) -> bool:
        """Learns that the proposal's session, whose tokens are known already, has gone on with these.

        Returns:
            Whether the proposal goes on below them; else another one takes its place. It is incomplete then.
        """
        return False

    def end(self, proposal: OpenProposal) -> None:
        """Drops what is kept for a proposal that will not be stepped any more."""
        return

    def forget(self, session_id: str) -> None:
        """Drops what is kept of a session, if anything is."""

    def resume(self, session_id: str) -> int:
        """Learns that a session is opened; returns the number of positions, from 0 on, whose features it has used."""
        return 0

    def give(self, session_id: str, features: FeatureSpan) -> bool:
        """Takes features of the target; returns whether they were of no use for a gap before them."""
        return False
