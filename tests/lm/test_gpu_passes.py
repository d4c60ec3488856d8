"""Passes in parts of one size. Here on a CPU, with an attention that reads what the GPU's kernels read.

The kernels themselves are tested by `make gpu-check`, with the tests of `test_transformer`.
"""

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import outrider.lm.attention
from outrider import native
from outrider.lm import gpu_passes
from outrider.lm.attention.gpu_rows import PADDING, GpuPass, describe, header_len
from outrider.lm.gpu_passes import GpuPasses
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.model import FeatureSource, LanguageModel, SessionStep
from outrider.lm.pass_plan import plan_pass
from outrider.lm.transformer import EngineOptions, TransformersModel
from outrider.tokens import NodeKind, ProposalNode, ProposalTree, TokenSpan
from tests.lm.models import CONFIGS, save_model

NUM_ROWS = 8


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    outrider_pass: GpuPass,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """What the kernels compute, row by row, in float64."""
    numbers, page_len = outrider_pass.numbers.tolist(), outrider_pass.page_len
    num_rows = query.shape[2]
    assert num_rows == NUM_ROWS
    positions, tables, places = (numbers[first * num_rows : (first + 1) * num_rows + 1] for first in (1, 2, 3))
    for row in range(num_rows):
        for place in range(places[row], places[row + 1]):
            module.kv_keys[numbers[place]] = key[0, :, row]
            module.kv_values[numbers[place]] = value[0, :, row]
    output = query.new_zeros(1, num_rows, query.shape[1], value.shape[3])
    for row in range(num_rows):
        if tables[row] == PADDING:
            continue
        seen = range(max(0, positions[row] + 1 - (sliding_window or 1 << 20)), positions[row] + 1)
        slots = [numbers[tables[row] + at // page_len] * page_len + at % page_len for at in seen]
        keys, values = (
            stored[slots].double().repeat_interleave(query.shape[1] // key.shape[1], 1)
            for stored in (module.kv_keys, module.kv_values)
        )
        scores = torch.einsum("hd,khd->hk", query[0, :, row].double(), keys) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        output[0, row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return output


def _gpu_passes(model: TransformersModel, options: EngineOptions) -> GpuPasses:
    return GpuPasses(model._run_rows, 32, torch.device("cpu"), captures=False)


@pytest.fixture(params=["llama", "gemma2-softcap-window"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LanguageModel, LanguageModel]]:
    """A model whose passes run in parts, and the same one without."""
    folder = save_model(CONFIGS[request.param], tmp_path)
    monkeypatch.setattr(native, "best_variant", lambda: None)
    whole = load_model(folder, LoadOptions()).model
    kernels = SimpleNamespace(attend=attend)
    monkeypatch.setitem(sys.modules, "outrider.lm.attention.gpu", kernels)
    monkeypatch.setattr(outrider.lm.attention, "gpu", kernels, raising=False)
    monkeypatch.setattr(gpu_passes, "NUM_ROWS", NUM_ROWS)
    monkeypatch.setattr(TransformersModel, "_made_gpu_passes", _gpu_passes)
    yield load_model(folder, LoadOptions()).model, whole


def _tokens(num: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 64), k=num))


def _tree() -> ProposalTree:
    tree = ProposalTree()
    for parent, token_id in ((0, 5), (1, 6), (0, 7), (3, 8), (3, 9), (2, 4)):
        tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
    return tree


def _features(model: LanguageModel) -> FeatureSource:
    assert model.features is not None
    return model.features


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found.float() - expected.float()).abs().max() < 1e-4 * expected.float().abs().max())


def test_they_give_what_whole_passes_give(pair: tuple[LanguageModel, LanguageModel]) -> None:
    """Several sessions, a prompt of many parts, a tree whose branches begin in an earlier part, and features."""
    results = []
    for model in pair:
        _features(model).keep((1, 3))
        long, short = model.new_cache(), model.new_cache()
        logits = model.forward(
            [SessionStep(short, TokenSpan(0, _tokens(3))), SessionStep(long, TokenSpan(0, _tokens(37)))]
        )
        logits += model.forward(
            [SessionStep(long, TokenSpan(37, _tokens(9, 1)), _tree()), SessionStep(short, TokenSpan(3, _tokens(1, 2)))]
        )
        long.keep((3, 5))
        logits += model.forward([SessionStep(long, TokenSpan(48, (11,)))])
        results.append((logits, _features(model).read(long, (1, 3), 0, 49)))
    (found, found_features), (expected, expected_features) = results
    assert [part.shape for part in found] == [part.shape for part in expected]
    assert all(map(_close, found, expected))
    assert (
        found_features.float() - expected_features.float()
    ).abs().max() < 0.05 * expected_features.float().abs().max()


def test_where_a_prompt_is_cut_does_not_matter(pair: tuple[LanguageModel, LanguageModel]) -> None:
    model, tokens = pair[0], _tokens(45)
    outputs = []
    for cuts in ([], [1], [8], [7, 9, 30], [44]):
        cache = model.new_cache()
        for start, end in itertools.pairwise([0, *cuts, len(tokens)]):
            logits = model.forward([SessionStep(cache, TokenSpan(start, tokens[start:end]))])[0]
        outputs.append(logits[0])
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert model.info.part_rows == 128
    assert model.info.padded_sizes.first == model.info.padded_sizes.step == 16


def test_a_pass_without_wanted_logits_has_none(pair: tuple[LanguageModel, LanguageModel]) -> None:
    model = pair[0]
    [logits] = model.forward([SessionStep(model.new_cache(), TokenSpan(0, _tokens(20)), wants_logits=False)])
    assert logits.shape == (0, 64)


def test_numbers_grow_with_the_page_tables(pair: tuple[LanguageModel, LanguageModel]) -> None:
    model, whole = pair
    assert isinstance(model, TransformersModel)
    passes = model._gpu_passes
    assert passes is not None
    passes._numbers = torch.zeros(1, dtype=torch.int32)
    sessions = [_tokens(40, seed) for seed in range(4)]
    found, expected = (
        each.forward([SessionStep(each.new_cache(), TokenSpan(0, tokens)) for tokens in sessions])
        for each in (model, whole)
    )
    assert all(map(_close, found, expected))
    assert len(passes._numbers) == 64


def test_parts_have_every_row_branch_and_write_once(pair: tuple[LanguageModel, LanguageModel]) -> None:
    cache = pair[1].new_cache()
    plan = plan_pass([SessionStep(cache, TokenSpan(0, _tokens(21)), _tree())], 32)
    parts = plan.parts(NUM_ROWS)
    assert [len(part.token_ids) for part in parts] == [8, 8, 8, 3]
    assert [token_id for part in parts for token_id in part.token_ids] == plan.token_ids
    assert [row + 8 * number for number, part in enumerate(parts) for row in part.wanted] == plan.wanted
    writes = [
        (row + 8 * number, slot)
        for number, part in enumerate(parts)
        for row, slot in zip(part.rows.write_rows, part.rows.write_slots, strict=True)
    ]
    assert sorted(writes) == sorted(zip(plan.rows.write_rows, plan.rows.write_slots, strict=True))
    rows = [
        (branch.table, row + 8 * number, position)
        for number, part in enumerate(parts)
        for branch in part.rows.branches
        for row, position in zip(branch.rows, branch.positions, strict=True)
    ]
    assert sorted(rows) == sorted(
        (branch.table, row, position)
        for branch in plan.rows.branches
        for row, position in zip(branch.rows, branch.positions, strict=True)
    )


def test_a_pass_is_one_tensor_of_numbers(pair: tuple[LanguageModel, LanguageModel]) -> None:
    cache = pair[1].new_cache()
    plan = plan_pass([SessionStep(cache, TokenSpan(0, (7, 8, 9)))], 32)
    [branch] = plan.rows.branches
    numbers = describe(4, plan.token_ids, plan.positions, plan.rows).tolist()
    first = header_len(4)
    assert numbers[:4] == [7, 8, 9, 9]
    assert numbers[4:8] == [0, 1, 2, 2]
    assert numbers[8:12] == [first + 3, first + 3, first + 3, PADDING]
    assert numbers[12:first] == [first, first + 1, first + 2, first + 3, first + 3]
    assert numbers[first : first + 3] == plan.rows.write_slots
    assert tuple(numbers[first + 3 :]) == branch.table
