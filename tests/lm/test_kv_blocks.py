"""KV blocks move a KV cache from one process to another, bit for bit."""

from pathlib import Path

import pytest
import torch

from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.model import BlockSource, KVCache, LanguageModel, SessionStep
from outrider.tokens import NodeKind, ProposalNode, ProposalTree, TokenSpan
from tests.lm.models import CONFIGS, save_model

TEXT = tuple(3 + 7 * index % 60 for index in range(100))
SALT = b"tenant"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(CONFIGS["llama"], tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


def load(folder: str, kv_budget_bytes: int = 1 << 22) -> tuple[LanguageModel, BlockSource]:
    model = load_model(folder, LoadOptions(kv_budget_bytes=kv_budget_bytes)).model
    assert model.blocks is not None
    assert model.blocks.take_fresh() == []
    return model, model.blocks


def run(model: LanguageModel, cache: KVCache, end: int) -> torch.Tensor:
    start = cache.cached_len
    logits = model.forward([SessionStep(cache, TokenSpan(start, TEXT[start:end]))])[0]
    cache.keep(())
    return logits


def move(blocks: list[tuple[bytes, torch.Tensor]], to: BlockSource) -> list[bool]:
    return [to.put(digest, content.clone()) for digest, content in blocks]


@pytest.mark.parametrize("layers", [(), (0, 3)], ids=["plain", "features"])
def test_a_restored_session_has_the_bits_it_was_computed_with(folder: str, layers: tuple[int, ...]) -> None:
    first, blocks = load(folder)
    second, others = load(folder)
    for model in (first, second):
        assert model.features is not None
        model.features.keep(layers)
    assert blocks.layout == others.layout
    cache = first.new_cache(SALT)
    wanted = run(first, cache, len(TEXT))
    fresh = blocks.take_fresh()
    assert len(fresh) == len(TEXT) // blocks.block_len == 3
    assert all(content.numel() == blocks.block_bytes for _, content in fresh)
    restored = second.new_cache(SALT)
    assert [digest for _, digest in restored.absent(TEXT)] == [digest for digest, _ in fresh]
    assert move(fresh, others) == [True] * 3
    assert restored.absent(TEXT) == []
    assert restored.adopt(TEXT) == 3 * blocks.block_len
    assert torch.equal(run(second, restored, len(TEXT)), wanted)
    assert others.take_fresh() == []  # restored blocks are not fresh
    if layers:
        assert first.features is not None and second.features is not None
        given = second.features.read(restored, layers, 0, len(TEXT))
        assert torch.equal(given, first.features.read(cache, layers, 0, len(TEXT)))


def test_the_layout_names_the_features_that_are_kept(folder: str) -> None:
    model, blocks = load(folder)
    before = blocks.layout, blocks.block_bytes
    assert model.features is not None
    model.features.keep((1,))
    assert blocks.layout != before[0]
    assert blocks.block_bytes == before[1] + blocks.block_len * 32 * 2


def test_tenants_and_other_texts_have_other_digests(folder: str) -> None:
    model, _ = load(folder)
    own = model.new_cache(SALT).absent(TEXT)
    assert [index for index, _ in own] == [0, 1, 2]
    other = (4, *TEXT[1:])
    assert not {digest for _, digest in own} & {digest for _, digest in model.new_cache(b"other").absent(TEXT)}
    assert not {digest for _, digest in own} & {digest for _, digest in model.new_cache(SALT).absent(other)}
    # The last token is always run, so that a page that ends with it is never a hit.
    assert model.new_cache(SALT).absent(TEXT[:64]) == own[:1]


def test_what_is_absent_begins_behind_what_is_to_be_found(folder: str) -> None:
    model, _ = load(folder)
    run(model, model.new_cache(SALT), 40)
    assert [index for index, _ in model.new_cache(SALT).absent(TEXT)] == [1, 2]


def test_pages_that_are_not_full_or_were_rolled_back_are_not_fresh(folder: str) -> None:
    model, blocks = load(folder)
    cache = model.new_cache(SALT)
    run(model, cache, 31)
    cache.release()
    assert blocks.take_fresh() == []
    tree = ProposalTree()
    tree.append(ProposalNode(0, 5, NodeKind.GUESSED))
    cache.adopt(TEXT)
    model.forward([SessionStep(cache, TokenSpan(31, TEXT[31:32]), tree)])
    cache.keep((1,))
    cache.truncate(20)
    run(model, cache, 32)
    assert len(blocks.take_fresh()) == 1


def test_wrong_sizes_and_full_memory(folder: str) -> None:
    first, blocks = load(folder)
    run(first, first.new_cache(SALT), len(TEXT))
    fresh = blocks.take_fresh()
    page_bytes = first.kv_usage.page_bytes
    small, others = load(folder, kv_budget_bytes=4 * page_bytes)
    with pytest.raises(ValueError, match="must have"):
        others.put(fresh[0][0], fresh[0][1][:-1])
    held = small.new_cache(b"another")
    run(small, held, 70)
    assert move(fresh, others) == [True, True, True]  # the first pages are evicted: one page is free
    assert small.kv_usage.num_reusable == 1
    run(small, held, 100)
    assert move(fresh[:1], others) == [False]


def test_what_is_published_already_stays(folder: str) -> None:
    model, blocks = load(folder)
    run(model, model.new_cache(SALT), 40)
    ((digest, content),) = blocks.take_fresh()
    assert blocks.put(digest, torch.zeros_like(content))
    cache = model.new_cache(SALT)
    assert cache.adopt(TEXT) == 32
    again, _ = load(folder)
    assert torch.equal(run(model, cache, 60), run(again, again.new_cache(SALT), 60))


def test_models_without_pages_of_their_own_have_none(tmp_path: Path) -> None:
    model = load_model("markov:vocabulary=5,order=2,seed=1", LoadOptions(kv_budget_bytes=1 << 20)).model
    assert model.blocks is None
