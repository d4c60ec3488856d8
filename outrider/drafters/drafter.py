"""The interface between engines and drafters. It needs no model library."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from outrider.control.pass_times import PassTimes
from outrider.errors import OutriderError
from outrider.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.parameters import AcceptanceRule, SamplingParameters
from outrider.tokens import FeatureSpan, NodeKind, ProposalNode, SparseDistribution

if TYPE_CHECKING:
    from outrider.drafters.features import Features

_MAX_SHORT_LEN: Final = 16
_ANY_VOCABULARY_SIZE: Final = 2**32 - 1
"""The largest size that the wire can represent."""


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """Identity and limits of a drafter.

    Attributes:
        drafter: its kind: ngram, suffix, model, layers, eagle3, block or medusa; or two of them, as eagle3+suffix.
        model: as configured; the drafter's kind where there is no model.
        model_fingerprint: SHA-256 over the model's configuration and weights; empty where there is no model.
        tokenizer_fingerprint: SHA-256 over the vocabulary; empty where any vocabulary fits.
        numerics: identity of all that determines the bits of a logit; empty where there are none.
        vocabulary_size: token ids are below it.
        max_session_len: longest session, in tokens.
        eos_token_ids: the model's end-of-text tokens.
        feature_layers: layers of the target whose features it takes.
        hidden_size: H of one of these features; 0 where there are none.
        target_fingerprint: of the one target that it was made for; empty where that is unknown.
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

    @property
    def feature_width(self) -> int:
        """Numbers of a position's features, of all layers; 0 where it takes none."""
        return len(self.feature_layers) * self.hidden_size

    @classmethod
    def of_lookup(cls, kind: str, max_session_len: int) -> Self:
        """Return the identity of a drafter without a model: it copies token ids, and so fits any vocabulary."""
        return cls(kind, kind, "", "", "", _ANY_VOCABULARY_SIZE, max_session_len)


@dataclass(frozen=True, slots=True)
class DraftTerms:
    """The terms of all proposals of a session, fixed when it is opened.

    Attributes:
        parameters: the request's sampling parameters; the draft's own distribution follows them too.
        acceptance_rule: the rule by which the proposals are verified.
        prompt_len: length of the session when the request's output begins.
        stop_token_ids: token ids that end a branch.
        cache_salt: sessions of the same salt may share KV cache.
        p_min: probability below which a branch ends; None for the drafter's own.
        prediction: tokens that the request's output is expected to be.
        grammar: of the request's constraint, which may be compiled later than a proposal is drafted; None without one,
            or where it is not known which tokens stand for which text.
    """

    parameters: SamplingParameters
    acceptance_rule: AcceptanceRule
    prompt_len: int
    stop_token_ids: frozenset[int]
    cache_salt: bytes = b""
    p_min: float | None = None
    prediction: Sequence[int] = ()
    grammar: CompiledGrammar | None = None


@dataclass(slots=True, eq=False)
class OpenProposal:
    """A proposal that is being drafted for one session; a drafter appends to it step by step, or fills it at once.

    Invariants: `token_ids` changes by `Drafter.advance` only; no node is added to a complete proposal.

    Attributes:
        session_id: the session.
        token_ids: the session's tokens.
        terms: of the session.
        num_speculative_tokens: most nodes from the base to a leaf, where it does not run ahead.
        max_nodes: most nodes below the text; 0 leaves it to the drafter.
        lookahead: most nodes below the text, where it runs ahead of the target's verdicts; else 0.
        max_len: tokens of the longest session.
        nodes: the nodes below its root so far.
        values: of each of them about the probability that the target accepts it, where the drafter estimates that.
        complete: whether no more nodes will be drafted before the session has more tokens.
        took_steps: whether steps of a model were run for the latest nodes, or whatever else the drafter's time goes to.
        root_len: tokens of the session at its root; node numbers count from there.
        refusal: the error for which the drafter does not draft, where it does not.
        missing_features_from: the session position of the first feature that is missing; None while none is. Until
            features arrive, `step` is not called for it.
    """

    session_id: str
    token_ids: Sequence[int]
    terms: DraftTerms
    num_speculative_tokens: int
    max_nodes: int = 0
    lookahead: int = 0
    max_len: int = 1 << 31
    nodes: list[ProposalNode] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    complete: bool = False
    took_steps: bool = True
    refusal: OutriderError | None = None
    missing_features_from: int | None = None
    root_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.root_len = len(self.token_ids)
        self.complete = self.complete or self.num_speculative_tokens <= 0

    def token_id(self, position: int) -> int:
        """Return the token at that session position, drafted ones of a chain included."""
        known_len = len(self.token_ids)
        return self.token_ids[position] if position < known_len else self.nodes[position - known_len].token_id

    def append(self, token_id: int, distribution: SparseDistribution | None = None) -> None:
        """Add a drafted node; the proposal is complete with a stop token, or when it has all its nodes."""
        self.nodes.append(ProposalNode(len(self.nodes), token_id, NodeKind.DRAFTED, distribution))
        most = max(self.num_speculative_tokens, self.lookahead)
        full = len(self.nodes) >= (min(most, self.max_nodes) if self.max_nodes else most)
        self.complete = full or token_id in self.terms.stop_token_ids

    def fill(self, nodes: Sequence[ProposalNode], values: Sequence[float] = ()) -> None:
        """Add all nodes at once, parents before their children, and complete the proposal; see `values`."""
        self.nodes.extend(nodes)
        self.values.extend(values)
        self.complete = True

    def refuse(self, error: OutriderError) -> None:
        """End the proposal with an error."""
        self.refusal = error
        self.complete = True


class StepRows(NamedTuple):
    """The rows of a step.

    Attributes:
        num_decode: rows of nodes and of short texts, which cost as much.
        prompts: of each long part of a text its number of rows, and the session position of the first.
    """

    num_decode: int = 0
    prompts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, num_nodes: int, texts: Iterable[tuple[int, int]]) -> Self:
        """Return the rows of so many nodes and of parts of texts, each by its rows and the position of the first."""
        texts = list(texts)
        num_short = sum(num for num, _ in texts if num <= _MAX_SHORT_LEN)
        return cls(num_nodes + num_short, tuple(text for text in texts if text[0] > _MAX_SHORT_LEN))

    @property
    def num_rows(self) -> int:
        """All rows."""
        return self.num_decode + sum(num for num, _ in self.prompts)


class Drafter(Protocol):
    """Drafts for many sessions at once. All calls come from one thread.

    It may drop its state of a session (an index, a KV cache) at any time: the state can be made again from a proposal's
    tokens, and changes no proposal. The tokens of a proposal follow from the session's tokens, its terms and the
    drafter's configuration alone, so that a lookup is a point mass under `rejection`; the shape of a tree may follow
    from earlier measurements, and which tokens it has from whether the constraint was compiled in time.

    Attributes:
        times: of its steps, recorded by the caller that runs them.
        compiler: of constraints, for the vocabulary that it drafts in; None where it has no tokenizer.
    """

    times: PassTimes
    compiler: GrammarCompiler | None = None

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

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a path that one step drafts."""
        return 1

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        """Advance each proposal by up to one pass: append nodes, complete it, or refuse it.

        A step that adds no node to an incomplete proposal has run a part of its text (a prefill chunk), or the
        proposal's main line is as long as was requested, and other sessions' nodes are worth more.

        Returns:
            The rows that were run.
        """

    def truncate(self, session_id: str, length: int) -> None:
        """Record that the session's tokens from position `length` on may have changed."""

    def advance(self, proposal: OpenProposal, token_ids: Sequence[int]) -> bool:
        """Record that the proposal's session, whose tokens include them already, has gone on with these tokens.

        Returns:
            Whether the proposal goes on below them, and is incomplete; else another one replaces it.
        """
        return False

    def end(self, proposal: OpenProposal) -> None:
        """Drop the state of a proposal that will not be stepped any more."""
        return

    def forget(self, session_id: str) -> None:
        """Drop the state of a session, if there is any."""

    def resume(self, session_id: str) -> int:
        """Begin a session; return the number of positions, from 0 on, whose features have been used."""
        return 0

    def give(self, session_id: str, features: "Features") -> bool:
        """Take features of the target; return whether there was a gap before them, for which they were dropped."""
        return False


def give_bytes(drafter: Drafter, session_id: str, features: FeatureSpan) -> bool:
    """Have a drafter take features that came as bytes; one that takes none drops them.

    Returns:
        Whether there was a gap before them.

    Raises:
        InvalidArgument: the data are not of whole positions.
    """
    width = drafter.info.feature_width
    if not width:
        return False
    from outrider.drafters.features import Features  # with PyTorch, which drafters without a model do not load

    return drafter.give(session_id, Features.of(features, width))
