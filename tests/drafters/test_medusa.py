"""Medusa's heads guess from one feature."""

from itertools import product

import torch

from outrider.parameters import SamplingParameters
from outrider.tokens import ProposalTree
from tests.draft_service.conftest import draft, proposal, terms
from tests.drafters.heads import VOCABULARY, TinyMedusa
from tests.drafters.models import ByLikelihood

GREEDY = terms(SamplingParameters(temperature=0.0))
TEXT = tuple(range(3, 23))


def test_a_chain_has_every_heads_first_choice() -> None:
    tiny = TinyMedusa.make()
    drafter = tiny.drafter()
    drafter.give("s", tiny.span(0, 9))
    wanted = tuple(VOCABULARY.token_ids[tiny.logits(8).argmax(-1)].tolist())
    assert draft(drafter, proposal(TEXT[:10], 8, given=GREEDY)) == [wanted]
    assert drafter.tokens_per_step == len(wanted)


def test_a_tree_has_the_most_confident_products() -> None:
    tiny = TinyMedusa.make()
    drafter = tiny.drafter()
    # As after outcomes that show that its probabilities are right.
    drafter._node_values = ByLikelihood.of_all_sessions()
    drafter.give("s", tiny.span(8, 9))
    found = proposal(TEXT[:10], 3, given=GREEDY)
    found.max_nodes = 8
    draft(drafter, found)
    logs = tiny.logits(8).log_softmax(-1)
    scores = {
        path: sum(float(logs[depth, place]) for depth, place in enumerate(path))
        for length in (1, 2, 3)
        for path in product(range(logs.shape[1]), repeat=length)
    }
    best = sorted(scores, key=lambda path: -scores[path])[:8]
    tree = ProposalTree()
    for node in found.nodes:
        tree.append(node)
    paths = {tuple(tree.node(step).token_id for step in tree.path(number)) for number in range(1, 9)}
    wanted = {tuple(VOCABULARY.token_ids[list(path)].tolist()) for path in best}
    assert len(paths & wanted) >= 7  # bfloat16 leaves the order of near-equals open


def test_only_the_last_feature_is_kept_and_asked_for() -> None:
    tiny = TinyMedusa.make()
    drafter = tiny.drafter()
    waiting = proposal(TEXT[:10], 3, given=GREEDY)
    drafter.step([waiting])
    assert waiting.missing_features_from == 8
    drafter.give("s", tiny.span(8, 9))
    waiting.missing_features_from = None
    draft(drafter, waiting)
    drafter.give("s", tiny.span(9, 12))
    assert drafter.used_bytes == 2 * tiny.features.shape[1]
    following = proposal(TEXT[:13], 3, given=GREEDY)
    wanted = tuple(VOCABULARY.token_ids[tiny.logits(11).argmax(-1)].tolist())
    assert draft(drafter, following) == [wanted]
    assert drafter.resume("s") > 1 << 30 and drafter.used_bytes == 0


def test_the_noise_of_each_position_ranks_its_guesses() -> None:
    tiny = TinyMedusa.make()
    sampled = terms(SamplingParameters(temperature=1.0, seed=5))
    chains = set()
    for length in range(5, 15):
        drafter = tiny.drafter()
        drafter.give("s", tiny.span(length - 2, length - 1))
        [chain] = draft(drafter, proposal(TEXT[:length], 3, given=sampled))
        assert torch.isin(torch.tensor(chain), VOCABULARY.token_ids).all()
        chains.add(chain)
    assert len(chains) > 5
