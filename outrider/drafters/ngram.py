"""Prompt lookup: the tokens that followed an earlier occurrence of the session's last few tokens (Saxena 2023)."""

from array import array
from collections.abc import Sequence
from typing import Final

from outrider.control.pass_times import PassTimes
from outrider.drafters.drafter import Drafter, DrafterInfo, OpenProposal, StepRows
from outrider.drafters.states import BoundedStates
from outrider.parameters import AcceptanceRule
from outrider.tokens import SparseDistribution

KIND: Final = "ngram"
SHORTEST: Final = 2
LONGEST: Final = 5
"""Tokens of the n-grams that are looked up. One token alone leads almost anywhere; one more than five costs an entry of
the index for each token, and almost never leads elsewhere than its last five do."""

_TOKEN_BYTES: Final = 4
# A dictionary entry with its key, a tuple of a few shared integers; measured with tracemalloc on CPython 3.11.
_ENTRY_BYTES: Final = 180


class NgramIndex:
    """The position after the last occurrence of each n-gram of a growing sequence of tokens.

    An entry leads to the position of the token after the n-gram, so the n-gram at the very end has none yet: a lookup
    of the sequence's own end finds an earlier occurrence. Each entry keeps the one it replaced, so that truncation
    restores exactly the entries of a fresh index of the shorter sequence.

    Args:
        shortest: tokens of the shortest n-gram, at least 1.
        longest: tokens of the longest n-gram.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._token_ids = array("I")
        self._latest: dict[tuple[int, ...], int] = {}
        # For each size and position, the entry that was replaced there; 0, which follows no n-gram, where none was.
        self._replaced = {size: array("I") for size in self._sizes}

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes, about."""
        return len(self._latest) * _ENTRY_BYTES + len(self) * _TOKEN_BYTES * (1 + len(self._sizes))

    def release(self) -> None:
        """Drop all tokens."""
        self.truncate(0)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end, in O(tokens added)."""
        for token_id in token_ids:
            position = len(self._token_ids)
            for size, replaced in self._replaced.items():
                replaced.append(self._enter(size, position))
            self._token_ids.append(token_id)

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on, in O(tokens dropped)."""
        while len(self._token_ids) > length:
            position = len(self._token_ids) - 1
            for size, replaced in self._replaced.items():
                self._restore(size, position, replaced.pop())
            self._token_ids.pop()

    def continuation(self) -> int | None:
        """Return the position after the latest earlier occurrence of the longest n-gram that ends the sequence."""
        length = len(self._token_ids)
        keys = (self._key(size, length) for size in self._sizes if size <= length)
        return next((self._latest[key] for key in keys if key in self._latest), None)

    def _key(self, size: int, position: int) -> tuple[int, ...]:
        return tuple(self._token_ids[position - size : position])

    def _enter(self, size: int, position: int) -> int:
        """Point the n-gram before `position` there; return the position that it pointed to before, 0 for none."""
        if position < size:
            return 0
        key = self._key(size, position)
        replaced = self._latest.get(key, 0)
        self._latest[key] = position
        return replaced

    def _restore(self, size: int, position: int, replaced: int) -> None:
        if position < size:
            return
        key = self._key(size, position)
        if replaced:
            self._latest[key] = replaced
        else:
            del self._latest[key]


class NgramDrafter(Drafter):
    """A `Drafter` without a model: proposes the continuation of an earlier occurrence of the session's last tokens.

    Args:
        shortest: tokens of the shortest n-gram that is looked up, at least 1.
        longest: tokens of the longest one; it is tried first.
        budget_bytes: memory of the indexes that are kept, of sessions in use and idle together.
        max_session_len: longest session, in tokens.
    """

    def __init__(self, shortest: int, longest: int, budget_bytes: int, max_session_len: int) -> None:
        self.times = PassTimes()
        self._indexes = BoundedStates(lambda: NgramIndex(shortest, longest), budget_bytes)
        self._info = DrafterInfo.of_lookup(KIND, max_session_len)

    @property
    def info(self) -> DrafterInfo:
        """Identity and limits."""
        return self._info

    @property
    def used_bytes(self) -> int:
        """Memory of the indexes, in bytes, about."""
        return self._indexes.used_bytes

    def step(self, proposals: Sequence[OpenProposal]) -> StepRows:
        """Complete every proposal with the result of its lookup, possibly nothing."""
        for proposal in proposals:
            self._draft(proposal)
        return StepRows(sum(len(proposal.nodes) for proposal in proposals))

    def truncate(self, session_id: str, length: int) -> None:
        """Drop the index of the tokens from position `length` on."""
        if (index := self._indexes.find(session_id)) is not None:
            index.truncate(length)

    def forget(self, session_id: str) -> None:
        """Drop the session's index."""
        self._indexes.forget(session_id)

    def _draft(self, proposal: OpenProposal) -> None:
        index = self._indexes.use(proposal.session_id)
        index.extend(proposal.token_ids[len(index) :])
        position = index.continuation()
        while position is not None and not proposal.complete:
            token_id = proposal.token_id(position)  # past the base it repeats what it has just drafted
            proposal.append(token_id, _point_mass(token_id, proposal.terms.acceptance_rule))
            position += 1
        proposal.complete = True
        self._indexes.weigh(proposal.session_id)
        self._indexes.make_room(0, in_use=())


def _point_mass(token_id: int, rule: AcceptanceRule) -> SparseDistribution | None:
    """Return the distribution of a lookup: it is a function of earlier tokens, so its token has all the probability."""
    return SparseDistribution((token_id,), (1.0,)) if rule is AcceptanceRule.REJECTION else None
