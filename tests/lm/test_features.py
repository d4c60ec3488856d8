"""Features are stored with keys and values: every cached position has them, however it was cached."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.errors import ModelUnsupported
from outrider.lm.features import FeatureStore
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.model import KVCache, LanguageModel, SessionStep
from outrider.tokens import ROOT, NodeKind, ProposalNode, ProposalTree, TokenSpan
from tests.lm.models import CONFIGS, save_model

LAYERS = (0, 2, 3)
TEXT = tuple(3 + 7 * index % 60 for index in range(50))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_model(CONFIGS["mistral-window"], tmp_path, dtype=torch.bfloat16)


@pytest.fixture
def model(folder: str) -> LanguageModel:
    return load_model(folder, LoadOptions(kv_budget_bytes=1 << 22)).model


def source(model: LanguageModel) -> FeatureStore:
    assert isinstance(model.features, FeatureStore)
    return model.features


def run(model: LanguageModel, cache: KVCache, token_ids: tuple[int, ...], tree: ProposalTree | None = None) -> None:
    span = TokenSpan(cache.cached_len, token_ids)
    model.forward([SessionStep(cache, span, tree or ProposalTree())])
    if tree is None:
        cache.keep(())


def guesses(*edges: tuple[int, int]) -> ProposalTree:
    tree = ProposalTree()
    for parent, token_id in edges:
        tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
    return tree


def expected(folder: str, token_ids: tuple[int, ...]) -> torch.Tensor:
    states = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([token_ids]), output_hidden_states=True)
    return torch.cat([states.hidden_states[layer][0] for layer in LAYERS], dim=-1).detach()


@pytest.mark.parametrize(
    ("compiles", "invariant"), [pytest.param(True, True, marks=pytest.mark.slow), (False, True), (False, False)]
)
def test_they_are_what_transformers_calls_hidden_states(folder: str, *, compiles: bool, invariant: bool) -> None:
    model = load_model(folder, LoadOptions(kv_budget_bytes=1 << 22, compiles=compiles, invariant=invariant)).model
    source(model).keep(LAYERS)
    cache = model.new_cache()
    run(model, cache, TEXT)
    found = source(model).read(cache, LAYERS, 0, len(TEXT))
    assert found.dtype is torch.bfloat16
    wanted = expected(folder, TEXT)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_layers_come_in_the_order_asked_for(model: LanguageModel) -> None:
    source(model).keep(LAYERS)
    cache = model.new_cache()
    run(model, cache, TEXT)
    first, second = source(model).read(cache, (3, 0), 4, 9), source(model).read(cache, (0, 3), 4, 9)
    assert torch.equal(first, second.roll(32, dims=-1))


def test_an_accepted_branch_has_the_features_of_a_plain_run(model: LanguageModel) -> None:
    source(model).keep(LAYERS)
    plain, branched = model.new_cache(b"plain"), model.new_cache(b"branched")
    run(model, plain, TEXT)
    # The second branch is accepted, and crosses a page boundary.
    tree = guesses((ROOT, 5), (1, 6), (ROOT, TEXT[30]), (3, TEXT[31]), (4, TEXT[32]), (5, TEXT[33]))
    run(model, branched, TEXT[:30], tree)
    branched.keep((3, 4, 5, 6))
    run(model, branched, TEXT[34:])
    wanted = source(model).read(plain, LAYERS, 0, len(TEXT))
    assert torch.equal(source(model).read(branched, LAYERS, 0, len(TEXT)), wanted)


def test_a_shared_prefix_has_features(model: LanguageModel) -> None:
    source(model).keep(LAYERS)
    first, second = model.new_cache(), model.new_cache()
    run(model, first, TEXT)
    assert second.adopt(TEXT) == 32
    run(model, second, TEXT[32:])
    wanted = source(model).read(first, LAYERS, 0, len(TEXT))
    assert torch.equal(source(model).read(second, LAYERS, 0, len(TEXT)), wanted)


def test_what_was_cached_before_is_neither_current_nor_found(model: LanguageModel) -> None:
    old = model.new_cache()
    run(model, old, TEXT)
    assert old.is_current
    source(model).keep(LAYERS)
    assert not old.is_current
    new = model.new_cache()
    assert new.is_current
    assert new.adopt(TEXT) == 0
    source(model).keep((0, 3))
    assert new.is_current


def test_keeping_changes_no_logit(folder: str) -> None:
    model = load_model(folder, LoadOptions(kv_budget_bytes=1 << 22, compiles=True)).model
    before = model.forward([SessionStep(model.new_cache(), TokenSpan(0, TEXT))])[0]
    source(model).keep(LAYERS)
    after = model.forward([SessionStep(model.new_cache(), TokenSpan(0, TEXT))])[0]
    assert torch.equal(before, after)


@pytest.mark.parametrize("layers", [(4,), (-1, 2)])
def test_a_layer_that_is_not_there_is_refused(model: LanguageModel, layers: tuple[int, ...]) -> None:
    with pytest.raises(ModelUnsupported, match=str(layers[0])):
        source(model).keep(layers)


def test_a_model_without_layers_has_none() -> None:
    model = load_model("markov:vocabulary=8").model
    assert model.features is None
    assert model.info.num_layers == 0


def test_their_memory_is_part_of_the_kv_budget(model: LanguageModel) -> None:
    before = model.kv_usage
    source(model).keep(LAYERS)
    after = model.kv_usage
    assert after.page_bytes == before.page_bytes + source(model).page_bytes
    assert after.num_pages < before.num_pages
    assert after.num_pages * after.page_bytes <= before.num_pages * before.page_bytes <= 1 << 22
    # All remaining pages can be allocated, and their features read.
    caches = [model.new_cache(bytes([number])) for number in range(4)]
    length = after.max_len // 4 // 32 * 32
    for cache in caches:
        for start in range(0, length, 512):
            run(model, cache, tuple(3 + at % 60 for at in range(start, min(length, start + 512))))
    assert model.kv_usage.num_held == 4 * length // 32
    for cache in caches:
        rows = source(model).read(cache, LAYERS, 0, length)
        assert rows.shape[0] == length and rows.abs().sum(1).min() > 0


def test_they_leave_room_for_the_longest_session_or_are_refused(model: LanguageModel) -> None:
    before = model.kv_usage
    with pytest.raises(ModelUnsupported, match="kv_budget_bytes"):
        source(model).keep(LAYERS, min_len=before.max_len)
    assert source(model).layers == ()
    assert model.kv_usage == before
    source(model).keep(LAYERS, min_len=before.max_len // 2)
    assert model.kv_usage.max_len >= before.max_len // 2
