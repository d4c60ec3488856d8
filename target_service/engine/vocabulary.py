"""Checks of token ids against the vocabulary of the target."""

from outrider.errors import InvalidArgument
from outrider.tokens import ProposalNode
from target_service.engine.commands import Open


def check_vocabulary(command: Open, size: int) -> None:
    """Raise `InvalidArgument` if a request names a token id outside a vocabulary of `size` tokens."""
    command.parameters.check_vocabulary(size)
    for field, token_ids in (("stop_token_ids", command.stop_token_ids), ("prediction", command.prediction)):
        largest = max(token_ids, default=0)
        if largest >= size:
            raise InvalidArgument(f"has token id {largest}, the vocabulary has {size}", field)


def check_node(node: ProposalNode, size: int) -> None:
    """Raise `InvalidArgument` if a proposed node has a token id outside a vocabulary of `size` tokens."""
    drafted = node.draft_distribution
    token_ids = (node.token_id, *(drafted.token_ids if drafted else ()))
    if max(token_ids) >= size:
        raise InvalidArgument("token_id is outside the vocabulary", "proposal")
