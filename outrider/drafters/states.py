"""The states of sessions at a drafter, under a memory budget: the least recently used are evicted first."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar


class State(Protocol):
    """A drafter's state of one session."""

    def release(self) -> None:
        """Free its memory; it is not used again."""

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""


StateT = TypeVar("StateT", bound=State)


class BoundedStates(Generic[StateT]):
    """States by session id, in the order of their last use.

    Args:
        make: makes the state of a session that has none.
        budget_bytes: memory of all states that `make_room` leaves.
    """

    def __init__(self, make: Callable[[], StateT], budget_bytes: int) -> None:
        self._make = make
        self._budget_bytes = budget_bytes
        self._states: OrderedDict[str, StateT] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._states)

    @property
    def used_bytes(self) -> int:
        """Memory held by all states when they were last weighed, in bytes."""
        return self._used_bytes

    def use(self, session_id: str, make: Callable[[], StateT] | None = None) -> StateT:
        """Return the session's state, made now if there was none, as the most recently used one.

        Args:
            session_id: the session.
            make: makes its state in place of the default one.
        """
        if session_id not in self._states:
            self._states[session_id] = (make or self._make)()
        self._states.move_to_end(session_id)
        return self._states[session_id]

    def find(self, session_id: str) -> StateT | None:
        """Return the session's state if there is one; this does not count as a use."""
        return self._states.get(session_id)

    def num_bytes(self, session_id: str) -> int:
        """Return the bytes of the session's state when it was last weighed; 0 where there is none."""
        return self._bytes.get(session_id, 0)

    def weigh(self, session_id: str) -> None:
        """Record the bytes that the session's state holds now."""
        num_bytes = self._states[session_id].num_bytes
        self._used_bytes += num_bytes - self._bytes.get(session_id, 0)
        self._bytes[session_id] = num_bytes

    def forget(self, session_id: str) -> None:
        """Drop the session's state, if there is one."""
        state = self._states.pop(session_id, None)
        if state is not None:
            state.release()
        self._used_bytes -= self._bytes.pop(session_id, 0)

    def make_room(self, num_bytes: int, in_use: Collection[str]) -> bool:
        """Evict states that are not in use until `num_bytes` more fit; return whether they do."""
        idle = [session_id for session_id in self._states if session_id not in in_use]
        for session_id in idle:
            if self._used_bytes + num_bytes <= self._budget_bytes:
                break
            self.forget(session_id)
        return self._used_bytes + num_bytes <= self._budget_bytes
