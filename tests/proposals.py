"""Proposals for tests."""

from outrider.tokens import ProposalNode, ProposalTree


def chain(token_ids: tuple[int, ...]) -> ProposalTree:
    """Returns the tree with one branch of drafted nodes, without distributions."""
    tree = ProposalTree()
    for parent, token_id in enumerate(token_ids):
        tree.append(ProposalNode(parent, token_id))
    return tree
