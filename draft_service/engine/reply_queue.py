"""Replies of a turn, which leave together, one message for each stream."""

from collections import defaultdict

from draft_service.engine.commands import Handle, Reply, ReplyStream
from outrider.serving.unexpected import UnexpectedErrors


class ReplyQueue:
    """Holds replies until they are sent. For the engine's thread."""

    def __init__(self) -> None:
        self._replies: defaultdict[ReplyStream, list[Reply]] = defaultdict(list)
        self._unexpected = UnexpectedErrors()

    def add(self, handle: Handle, reply: Reply) -> None:
        """Add a reply for a session."""
        self._replies[handle.stream].append(reply)

    def send(self) -> list[ReplyStream]:
        """Send all replies; return the streams that could not take theirs."""
        all_replies, self._replies = self._replies, defaultdict(list)
        failed = []
        for stream, replies in all_replies.items():
            try:
                stream.post(replies)
            except Exception as error:
                self._unexpected.log("replies could not be sent", error)
                failed.append(stream)
        return failed
