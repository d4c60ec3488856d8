from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.drafters.drafter import Drafter, OpenProposal
from outrider.drafters.loading import load_drafter
from outrider.drafters.options import DrafterKind, DrafterOptions
from outrider.drafters.shares import share_rows
from outrider.errors import ModelUnsupported, Overloaded
from outrider.lm.heads.checkpoint import DraftManifest, save_eagle3, save_vocabulary
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.parameters import REPLAYABLE_RULES, AcceptanceRule, SamplingParameters
from outrider.speculation.randomness import KeyedSource
from outrider.speculation.verification import verify_rejection
from outrider.tokens import NodeKind, ProposalTree
from tests.draft_service.conftest import draft, proposal, terms
from tests.drafters.models import RecordedModel, markov, model_drafter
from tests.exactness.rules import coupled
from tests.lm.heads.models import WIDTH, make_head
from tests.lm.models import CONFIGS, save_model

GREEDY = terms(SamplingParameters(temperature=0, max_tokens=10_000))


def _greedy(token_ids: list[int], num: int) -> tuple[int, ...]:
    model, tokens = markov(), list(token_ids)
    for _ in range(num):
        tokens.append(int(model.transitions[model.context(tokens)].argmax()))
    return tuple(tokens[len(token_ids) :])


def test_greedy_drafts_are_the_models_own_text() -> None:
    assert draft(model_drafter(), proposal([4, 7, 1], 8, given=GREEDY)) == [_greedy([4, 7, 1], 8)]


def test_a_step_gives_each_session_one_node() -> None:
    drafter = model_drafter()
    proposals = [proposal([1, 2, number], 4, str(number), GREEDY) for number in range(5)]
    for num in range(1, 5):
        assert drafter.step(proposals).num_rows == (15 if num == 1 else 5)
        assert [len(item.nodes) for item in proposals] == [num] * 5
        assert all(item.complete for item in proposals) == (num == 4)


def test_a_prompt_is_prefilled_in_chunks_beside_drafting_sessions() -> None:
    model = RecordedModel(markov())
    drafter = model_drafter(model, chunk=16)
    short = proposal([1, 2], 5, "short", GREEDY)
    prompt = [number % 24 for number in range(50)]
    long = proposal(prompt, 2, "long", GREEDY)
    assert draft(drafter, short, long) == [_greedy([1, 2], 5), _greedy(prompt, 2)]
    assert model.passes == [[2, 14], [15, 1], [15, 1], [6, 1], [1, 1]]


def test_a_common_beginning_is_run_once_for_sessions_of_one_salt() -> None:
    model = RecordedModel(markov())
    drafter = model_drafter(model, chunk=256)
    prompt = [number * 7 % 24 for number in range(100)]
    rows = []
    for session_id, last, salt in (("a", 1, b"x"), ("b", 2, b"x"), ("c", 3, b"y"), ("a", 1, b"x")):
        model.passes.clear()
        given = replace(GREEDY, cache_salt=salt)
        tokens = [*prompt, last]
        assert draft(drafter, proposal(tokens, 3, session_id, given)) == [_greedy(tokens, 3)]
        rows.append(sum(map(sum, model.passes)))
    # Pages are 16 long; the last token is always run, and so is each drafted one but the last.
    assert rows == [103, 103 - 96, 103, 3]


def test_accepted_drafts_are_not_run_again() -> None:
    model = RecordedModel(markov())
    drafter = model_drafter(model)
    [drafted] = draft(drafter, proposal([1, 2, 3], 4, given=GREEDY))
    model.passes.clear()
    longer = [1, 2, 3, *drafted, 9]
    assert draft(drafter, proposal(longer, 1, given=GREEDY)) == [_greedy(longer, 1)]
    assert model.passes == [[2]], "the last drafted token had no KV yet, and the bonus token is new"


def test_rejected_drafts_are_dropped() -> None:
    model = RecordedModel(markov())
    drafter = model_drafter(model)
    [drafted] = draft(drafter, proposal([1, 2, 3], 4, given=GREEDY))
    model.passes.clear()
    other = [1, 2, 3, drafted[0], (drafted[1] + 1) % 24]
    assert draft(drafter, proposal(other, 3, given=GREEDY)) == [_greedy(other, 3)]
    assert model.passes == [[1], [1], [1]]


def test_a_replay_finds_what_differs() -> None:
    drafter = model_drafter()
    draft(drafter, proposal([1, 2, 3, 4, 5], given=GREEDY))
    drafter.truncate("s", 2)
    assert draft(drafter, proposal([1, 2, 8, 4, 5], given=GREEDY)) == [_greedy([1, 2, 8, 4, 5], 4)]
    drafter.truncate("s", 0)
    assert draft(drafter, proposal([6], given=GREEDY)) == [_greedy([6], 4)]


def test_asking_again_gives_the_same() -> None:
    drafter = model_drafter()
    for rule in REPLAYABLE_RULES:
        first = proposal([1, 2], given=terms(rule=rule))
        again = proposal([1, 2], given=terms(rule=rule))
        assert draft(drafter, first) == draft(drafter, again)
        assert first.nodes == again.nodes


def _paths(found: OpenProposal) -> dict[tuple[int, ...], int]:
    """Returns the token ids down to each node, with the node's number."""
    tree = ProposalTree()
    for node in found.nodes:
        tree.append(node)
    return {tuple(tree.node(step).token_id for step in tree.path(number)): number for number in range(1, len(tree) + 1)}


def test_of_a_tree_nothing_is_run_twice_whichever_branch_the_text_takes() -> None:
    model = RecordedModel(markov())
    drafter = model_drafter(model)
    found = proposal([1, 2, 3], 3, given=GREEDY)
    found.max_nodes = 8
    draft(drafter, found)
    assert model.passes[0] == [3] and len(model.passes) == 3
    assert all(rows == [1] * len(rows) for rows in model.passes[1:])
    model.passes.clear()
    paths = _paths(found)
    side = max(path for path in paths if len(path) == 2 and any(other[:2] == path for other in paths if other != path))
    assert not drafter.advance(found, [*side, 9])
    longer = [1, 2, 3, *side, 9]
    assert draft(drafter, proposal(longer, 1, given=GREEDY)) == [_greedy(longer, 1)]
    assert model.passes == [[1]]


def test_nodes_say_how_probable_the_draft_finds_them_but_under_rejection() -> None:
    found, sampled = (
        proposal([4, 7, 1], 2, given=GREEDY),
        proposal([4, 7, 1], 2, given=terms(rule=AcceptanceRule.REJECTION)),
    )
    found.max_nodes = sampled.max_nodes = 8
    draft(model_drafter(), found)
    draft(model_drafter(), sampled)
    assert all(0 < node.likelihood < 1 for node in found.nodes)
    assert sum(node.likelihood for node in found.nodes if node.parent == 0) <= 1
    assert not any(node.likelihood for node in sampled.nodes)


def test_under_rejection_guesses_stand_beside_the_sampled_chain() -> None:
    given = terms(SamplingParameters(seed=11), AcceptanceRule.REJECTION)
    chain, found = proposal([4, 7, 1], 3, given=given), proposal([4, 7, 1], 3, given=given)
    found.max_nodes = 9
    draft(model_drafter(), chain)
    draft(model_drafter(), found)
    # What is sampled, and its distributions, do not depend on the guesses.
    assert [node.token_id for node in found.nodes[:3]] == [node.token_id for node in chain.nodes]
    for node, other in zip(found.nodes[:3], chain.nodes, strict=True):
        assert node.draft_distribution is not None and other.draft_distribution is not None
        assert node.draft_distribution.token_ids == other.draft_distribution.token_ids
    assert len(found.nodes) == 9
    assert all(node.kind is NodeKind.GUESSED and node.draft_distribution is None for node in found.nodes[3:])
    assert len(_paths(found)) == 9


def test_trees_of_many_sessions_grow_as_one_at_a_time() -> None:
    for rule in REPLAYABLE_RULES:
        given = terms(SamplingParameters(seed=11, presence_penalty=0.5), rule)
        batched = [proposal([number, 3] * (1 + number % 4), 3, str(number), given) for number in range(6)]
        alone = [proposal([number, 3] * (1 + number % 4), 3, "alone", given) for number in range(6)]
        for item in (*batched, *alone):
            item.max_nodes = 7
        draft(model_drafter(chunk=16), *batched)
        for one, other in zip(alone, batched, strict=True):
            draft(model_drafter(), one)
            assert len(one.nodes) == len(other.nodes) == 7
            # Under `coupled`, what is learnt from any session orders the trees of all.
            assert rule is AcceptanceRule.COUPLED or one.nodes == other.nodes


@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(temperature=0),
        SamplingParameters(seed=11),
        SamplingParameters(seed=11, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
        SamplingParameters(seed=11, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParameters(seed=11, logit_bias={3: 5.0}, min_tokens=4, stop_token_ids=(3,)),
    ],
)
def test_many_sessions_at_once_draft_as_one_at_a_time(rule: AcceptanceRule, parameters: SamplingParameters) -> None:
    given = terms(parameters, rule, stop_token_ids=parameters.stop_token_ids)
    prompts = [[number, (5 * number) % 24, 3] * (1 + number % 4) for number in range(9)]
    batched = [proposal(prompt, 6, str(number), given) for number, prompt in enumerate(prompts)]
    draft(model_drafter(chunk=16), *batched)
    for number, prompt in enumerate(prompts):
        alone = proposal(prompt, 6, "alone", given)
        draft(model_drafter(), alone)
        assert alone.nodes == batched[number].nodes


@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
def test_a_draft_that_is_the_target_is_always_accepted(rule: AcceptanceRule) -> None:
    model, drafter, base = markov(), model_drafter(), [3, 1, 4]
    verify = coupled if rule is AcceptanceRule.COUPLED else verify_rejection
    for seed in range(20):
        item = proposal(base, 5, str(seed), terms(SamplingParameters(seed=seed), rule))
        [drafted] = draft(drafter, item)
        tree = ProposalTree()
        for node in item.nodes:
            tree.append(node)

        def distribution(node: int, drafted: tuple[int, ...] = drafted) -> torch.Tensor:
            return model.transitions[model.context([*base, *drafted[:node]])]

        outcome = verify(tree, distribution, len(base), KeyedSource(seed))
        assert outcome.token_ids[:-1] == drafted


def test_kv_caches_stay_within_their_budget_and_change_no_proposal() -> None:
    drafter = model_drafter(kv_budget_bytes=4 * 60)
    prompts = {str(number): [number, 1, 2] * 5 for number in range(10)}
    for _ in range(2):
        for session_id, prompt in prompts.items():
            assert draft(drafter, proposal(prompt, 4, session_id, GREEDY)) == [_greedy(prompt, 4)]
            assert drafter.used_bytes <= 4 * 60
    drafter.forget("9")
    drafter.forget("never seen")


def test_a_session_that_does_not_fit_is_refused_and_the_others_draft() -> None:
    drafter = model_drafter(kv_budget_bytes=4 * 60)
    fits, too_long = proposal([1] * 30, 4, "fits", GREEDY), proposal([2] * 50, 4, "too long", GREEDY)
    assert draft(drafter, fits, too_long) == [_greedy([1] * 30, 4), ()]
    assert isinstance(too_long.refusal, Overloaded)
    assert fits.refusal is None


def test_rows_are_shared_evenly_and_nobody_is_left_out() -> None:
    assert share_rows([1, 1, 100], 32) == [1, 1, 30]
    assert share_rows([100, 100, 2], 32) == [15, 15, 2]
    assert share_rows([5, 5, 5], 2) == [1, 1, 1]
    assert share_rows([], 8) == []


def test_info_is_the_models() -> None:
    info = model_drafter().info
    assert (info.drafter, info.vocabulary_size, info.max_session_len) == ("model", 24, 4096)
    assert info.tokenizer_fingerprint == markov().info.tokenizer_fingerprint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_model(CONFIGS["llama"], tmp_path_factory.mktemp("llama")))


def _settings(checkpoint: Path, drafter: DrafterKind, num_layers: int | None) -> DrafterOptions:
    return DrafterOptions(drafter=drafter, model=str(checkpoint), device="cpu", num_layers=num_layers, compile=False)


def test_the_first_layers_draft_with_the_models_own_head(checkpoint: Path) -> None:
    whole = load_drafter(_settings(checkpoint, DrafterKind.MODEL, None))
    every = load_drafter(_settings(checkpoint, DrafterKind.LAYERS, 3))
    first = load_drafter(_settings(checkpoint, DrafterKind.LAYERS, 1))
    assert [drafter.info.drafter for drafter in (whole, first)] == ["model", "layers"]
    assert first.info.model_fingerprint != whole.info.model_fingerprint

    def drafted(drafter: Drafter) -> list[tuple[int, ...]]:
        return draft(drafter, *(proposal([5, 6, number], 6, str(number), GREEDY) for number in range(4)))

    assert drafted(every) == drafted(whole)
    assert drafted(first) != drafted(whole)


@pytest.fixture
def trimmed(tmp_path: Path) -> Path:
    """A model that may say every third token only."""
    folder = Path(save_model(CONFIGS["llama"], tmp_path))
    save_vocabulary(folder, DraftVocabulary(torch.arange(2, 64, 3), 64))
    return folder


def test_a_map_beside_the_model_bounds_what_it_says(checkpoint: Path, trimmed: Path) -> None:
    drafter = load_drafter(_settings(trimmed, DrafterKind.MODEL, None))
    [drafted] = draft(drafter, proposal([5, 6, 7], 6, "a", GREEDY))
    model = AutoModelForCausalLM.from_pretrained(checkpoint).requires_grad_(False)
    token_ids = [5, 6, 7]
    for token_id in drafted:
        logits = model(torch.tensor([token_ids])).logits[0, -1]
        assert token_id == max(range(2, 64, 3), key=lambda other: float(logits[other]))
        token_ids.append(token_id)
    assert drafter.info.vocabulary_size == 64


def test_under_rejection_the_law_is_of_the_tokens_that_it_can_say(trimmed: Path) -> None:
    given = terms(SamplingParameters(seed=3, max_tokens=100), AcceptanceRule.REJECTION)
    wanted = proposal([5, 6, 7], 4, "a", given)
    draft(load_drafter(_settings(trimmed, DrafterKind.MODEL, None)), wanted)
    for node in wanted.nodes:
        assert node.draft_distribution is not None
        assert set(node.draft_distribution.token_ids) == set(range(2, 64, 3))
        assert sum(node.draft_distribution.probabilities) == pytest.approx(1)


def test_a_head_is_no_model(tmp_path: Path) -> None:
    vocabulary = DraftVocabulary(torch.arange(0, 64, 4), 64)
    manifest = DraftManifest("eagle3", "a target", "f" * 64, "t" * 64, WIDTH, (1, 2, 3), 4, False)
    save_eagle3(tmp_path, make_head(), vocabulary, manifest)
    with pytest.raises(ModelUnsupported, match="do not have the shapes of its configuration"):
        load_drafter(_settings(tmp_path, DrafterKind.MODEL, None))
    save_eagle3(tmp_path, make_head(), vocabulary, replace(manifest, trimmed=True))
    with pytest.raises(ModelUnsupported, match=r"lacks \d+ weights of a llama model, such as lm_head"):
        load_drafter(_settings(tmp_path, DrafterKind.MODEL, None))


def test_a_map_of_another_model_is_refused(trimmed: Path) -> None:
    save_vocabulary(trimmed, DraftVocabulary(torch.arange(2, 64, 3), 65))
    with pytest.raises(ModelUnsupported, match="of 65 tokens, the model has 64"):
        load_drafter(_settings(trimmed, DrafterKind.MODEL, None))
