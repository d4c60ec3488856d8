"""Models with Outrider's attention: equal to transformers, and batch-invariant bit for bit."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, TorchAoConfig

from outrider import native
from outrider.control.pass_times import MULTIPLES_OF_FOUR, PaddedSizes
from outrider.errors import InvalidArgument, ModelUnsupported
from outrider.lm.attention import BLOCK_LEN
from outrider.lm.attention.interface import NAME as ATTENTION
from outrider.lm.kv_cache import PagedKVCache
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.model import KVCache, LanguageModel, SessionStep
from outrider.lm.packed_linear import NativeLinear, OneDnnLinear, PackedLinear, packed_kind
from outrider.lm.transformer import TransformersModel
from outrider.tokens import NodeKind, ProposalNode, ProposalTree, TokenSpan
from tests.lm.models import CONFIGS, RECURRENT, SMALL, save_model
from tests.proposals import chain

pytestmark = pytest.mark.usefixtures("two_threads")

KINDS = [
    *((config, dtype, "eager") for config, dtype in itertools.product(CONFIGS, ["float32", "bfloat16"])),
    # One of each kernel; compiling takes seconds a kind.
    ("llama", "bfloat16", "compiled"),
    pytest.param(("gemma2-softcap-window", "float32", "compiled"), marks=pytest.mark.slow),
    ("llama", "bfloat16", "int8"),
    # Without native operators.
    ("llama", "bfloat16", "blocks"),
    ("gemma2-softcap-window", "float32", "blocks"),
    *(
        pytest.param((config, dtype, "gpu"), marks=pytest.mark.gpu)
        for config, dtype in itertools.product(CONFIGS, ["float32", "bfloat16"])
    ),
]
INT8 = {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(kind))
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, LanguageModel]:
    config, dtype, how = request.param
    folder = save_model(CONFIGS[config], tmp_path_factory.mktemp("model"), dtype=getattr(torch, dtype))
    with pytest.MonkeyPatch.context() as patch:
        if how == "blocks":
            patch.setattr(native, "best_variant", lambda: None)
        options = LoadOptions(
            device="cuda" if how == "gpu" else "cpu",
            # All of it is written where free pages are spoilt.
            kv_budget_bytes=32 << 20,
            compiles=how == "compiled",
            quantization=INT8 if how == "int8" else None,
        )
        loaded = load_model(folder, options)
    is_native = native.best_variant() is not None and how not in ("blocks", "gpu")
    assert any(f"attention-{kind}-pages" in loaded.model.info.numerics for kind in ("native", "amx")) == is_native
    assert ("attention-triton" in loaded.model.info.numerics) == (how == "gpu")
    assert ("attention-blocks" in loaded.model.info.numerics) == (not is_native and how != "gpu")
    assert ("torchao" in loaded.model.info.numerics) == (how == "int8")
    assert ("pass-compiled" in loaded.model.info.numerics) == (how == "compiled")
    return folder, dtype, loaded.model


@pytest.fixture
def model(named: tuple[str, str, LanguageModel]) -> LanguageModel:
    return named[2]


def _tokens(num: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 64), k=num))


def _run(model: LanguageModel, tokens: tuple[int, ...], cuts: list[int]) -> torch.Tensor:
    """Return the logits after the last token, run in spans that end at the cuts."""
    cache = model.new_cache()
    for start, end in itertools.pairwise([0, *cuts, len(tokens)]):
        logits = model.forward([SessionStep(cache, TokenSpan(start, tokens[start:end]))])[0]
    return logits[0]


def test_equals_transformers(named: tuple[str, str, LanguageModel]) -> None:
    folder, dtype, model = named
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = _tokens(40)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0, -1]
    tolerance = 1e-3 if dtype == "float32" else 0.3
    assert (_run(model, tokens, []).cpu().float() - expected).abs().max() < tolerance * expected.abs().max()


def test_numerics_are_invariant(model: LanguageModel) -> None:
    assert model.info.numerics.endswith(" invariant")
    tokens = _tokens(BLOCK_LEN + 60)
    whole = _run(model, tokens, [])
    for cuts in ([1], [5, 6, 7], [100, 200], [BLOCK_LEN], [BLOCK_LEN - 1, BLOCK_LEN + 1], [len(tokens) - 1]):
        assert torch.equal(_run(model, tokens, cuts), whole), cuts


def test_bits_do_not_depend_on_other_sessions(model: LanguageModel) -> None:
    sessions = [_tokens(length, seed=length) for length in (3, 17, 90, BLOCK_LEN + 5)]
    alone = [_run(model, tokens, []) for tokens in sessions]
    for order in itertools.permutations(range(4), 3):
        steps = [SessionStep(model.new_cache(), TokenSpan(0, sessions[index])) for index in order]
        for index, logits in zip(order, model.forward(steps), strict=True):
            assert torch.equal(logits[0], alone[index])


def test_bits_do_not_depend_on_the_number_of_rows(model: LanguageModel) -> None:
    tokens = _tokens(40)
    alone = _run(model, tokens, [])
    for num_rows in range(1, 20):
        first, last = model.new_cache(), model.new_cache()
        for cache in (first, last):
            model.forward([SessionStep(cache, TokenSpan(0, tokens[:-1]), wants_logits=False)])
        # Kernels process rows in blocks, and remaining rows may use another kernel: so both ends of the pass.
        steps = [
            SessionStep(first, TokenSpan(39, tokens[-1:]), chain(_tokens(num_rows - 1, seed=num_rows))),
            SessionStep(last, TokenSpan(39, tokens[-1:])),
        ]
        logits = model.forward(steps)
        assert torch.equal(logits[0][0], alone), num_rows
        assert torch.equal(logits[1][0], alone), num_rows


def _spoil_free_pages(model: LanguageModel, cache: KVCache) -> None:
    """Leave in all pages that are not the cache's what a session whose numbers overflowed would."""
    assert isinstance(model, TransformersModel) and isinstance(cache, PagedKVCache)
    storage = model._storage
    free = sorted(set(range(1, storage.num_pages)) - set(cache.table))
    for tensor in storage.tensors:
        tensor.view(storage.num_pages, -1)[free] = float("nan")


def _random_tree(rng: random.Random, size: int) -> ProposalTree:
    tree = ProposalTree()
    while len(tree) < size:
        parent, token_id = rng.randrange(len(tree) + 1), rng.randrange(3, 12)
        if tree.child(parent, token_id) is None:
            tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
    return tree


@pytest.mark.parametrize("length", [20, BLOCK_LEN - 2])
def test_every_tree_row_equals_the_plain_run_of_its_branch(model: LanguageModel, length: int) -> None:
    rng = random.Random(length)
    for size in (1, 2, 5, 9):
        tokens, tree = _tokens(length, seed=size), _random_tree(rng, size)
        cache = model.new_cache()
        model.forward([SessionStep(cache, TokenSpan(0, tokens[:-1]), wants_logits=False)])
        rows = model.forward([SessionStep(cache, TokenSpan(length - 1, tokens[-1:]), tree)])[0]
        for number in range(size + 1):
            branch = tuple(tree.node(node).token_id for node in tree.path(number))
            assert torch.equal(rows[number], _run(model, tokens + branch, [])), (size, number)


@pytest.mark.parametrize("spoils", [False, True])
def test_a_kept_branch_is_as_good_as_a_plain_run(model: LanguageModel, spoils: bool) -> None:
    rng = random.Random(5)
    tokens = _tokens(BLOCK_LEN - 3)
    cache = model.new_cache()
    start, known = 0, tokens
    for _ in range(4):
        tree = _random_tree(rng, 6)
        if spoils:
            _spoil_free_pages(model, cache)
        model.forward([SessionStep(cache, TokenSpan(start, known[start:]), tree)])
        path = tree.path(rng.randrange(7))
        cache.keep(path)
        known += (*(tree.node(node).token_id for node in path), rng.randrange(3, 64))
        start = cache.cached_len
    logits = model.forward([SessionStep(cache, TokenSpan(start, known[start:]))])[0][0]
    assert torch.equal(logits, _run(model, known, []))


def test_dropped_proposals_leave_no_trace(model: LanguageModel) -> None:
    tokens = _tokens(30)
    cache = model.new_cache()
    for start in range(0, 30, 5):
        model.forward([SessionStep(cache, TokenSpan(start, tokens[start : start + 5]), chain((7, 8, 9)))])
    cache.truncate(29)
    logits = model.forward([SessionStep(cache, TokenSpan(29, tokens[29:]))])[0][0]
    assert torch.equal(logits, _run(model, tokens, []))


class FloatGated(nn.Module):
    """A layer with a float32 gate, like a router, whose output depends on every bit of the gate."""

    def __init__(self, layer: nn.Module, num_in: int) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.randn(num_in, num_in))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gates = torch.sin(2**14 * nn.functional.linear(rows.float(), self.weight))
        gated: torch.Tensor = self.layer(rows) * gates.to(rows.dtype)
        return gated


@pytest.mark.parametrize(("kind", "first"), [(NativeLinear, 2), (OneDnnLinear, 6)])
def test_a_weight_that_is_left_float32_keeps_rows_in_fours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[PackedLinear], first: int
) -> None:
    if kind is OneDnnLinear:
        monkeypatch.setattr(native, "best_variant", lambda: None)
    if packed_kind() is not kind:
        pytest.skip("this CPU cannot run it")
    folder = save_model(CONFIGS["llama"], tmp_path, dtype=torch.bfloat16)
    assert load_model(folder).model.info.padded_sizes == PaddedSizes(first, 2)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    for layer in loaded.model.layers:
        layer.mlp = FloatGated(layer.mlp, 32)
    model = TransformersModel("gated", loaded.eval(), "")
    assert f"linear-{kind.kind()}" in model.info.numerics
    assert model.info.padded_sizes == MULTIPLES_OF_FOUR
    test_numerics_are_invariant(model)
    test_bits_do_not_depend_on_the_number_of_rows(model)
    test_every_tree_row_equals_the_plain_run_of_its_branch(model, 20)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads"), [(256, 2, 1), (80, 6, 2), (96, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_other_sizes_on_a_gpu(
    tmp_path: Path, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
) -> None:
    # transformers refuses a hidden size that is no multiple of the number of heads, whatever their size.
    shape = {
        "hidden_size": 48,
        "head_dim": head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }
    folder = save_model(LlamaConfig(**{**SMALL, **shape}), tmp_path, dtype=dtype)
    model = load_model(folder, LoadOptions(device="cuda")).model
    assert "attention-triton" in model.info.numerics
    test_equals_transformers((folder, str(dtype).removeprefix("torch."), model))
    test_numerics_are_invariant(model)


def test_kv_bytes_per_token_follow_the_formula(named: tuple[str, str, LanguageModel]) -> None:
    # Keys and values of 3 layers, 2 heads, 8 numbers. PyTorch's own operations on a CPU need float32.
    _, dtype, model = named
    num_bytes = 2 if dtype == "bfloat16" and "attention-blocks" not in model.info.numerics else 4
    assert model.info.kv_token_bytes == 2 * 3 * 2 * 8 * num_bytes


@pytest.mark.parametrize("config", ["llama", "mistral-window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_invariance_it_is_right_and_says_so(tmp_path: Path, config: str, dtype: torch.dtype) -> None:
    folder = save_model(CONFIGS[config], tmp_path, dtype=dtype)
    exact, varying = (
        load_model(folder).model,
        load_model(folder, LoadOptions(invariant=False)).model,
    )
    assert varying.info.numerics.endswith(" varying")
    assert "sdpa" in varying.info.numerics
    assert varying.info.kv_token_bytes == 2 * 3 * 2 * 8 * dtype.itemsize
    tokens = _tokens(90)
    expected = _run(exact, tokens, [])
    tolerance = (1e-4 if dtype is torch.float32 else 0.1) * expected.abs().max()
    for cuts in ([], [1], [30, 31, 64], [89]):
        assert (_run(varying, tokens, cuts).float() - expected).abs().max() < tolerance


def test_without_invariance_bounded_scores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="bounds attention scores"):
        load_model(save_model(CONFIGS["gemma2-softcap-window"], tmp_path), LoadOptions(invariant=False))


def test_a_quantised_model_is_transformers_own(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    folder = save_model(CONFIGS["llama"], tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    model = load_model(folder, LoadOptions(quantization=INT8)).model
    tokens = _tokens(40)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0, -1]
    assert (_run(model, tokens, []) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert model.info.fingerprint != load_model(folder).model.info.fingerprint


@pytest.mark.parametrize("options", [{"quant_type": "Int3"}, {"quant_method": "unheard-of"}, {"quant_type": 3}])
def test_a_quantisation_that_is_not_understood_is_named(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises((InvalidArgument, ModelUnsupported), match=r"Int3|unheard-of|quant_type|int"):
        load_model(save_model(CONFIGS["llama"], tmp_path), LoadOptions(quantization={**INT8, **options}))


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported):
        load_model(save_model(RECURRENT, tmp_path))


def test_first_layers_only(tmp_path: Path) -> None:
    folder = save_model(CONFIGS["qwen3"], tmp_path)
    short = load_model(folder, LoadOptions(num_layers=1)).model
    assert short.info.kv_token_bytes * 3 == load_model(folder).model.info.kv_token_bytes
    assert short.info.fingerprint != load_model(folder).model.info.fingerprint
    with pytest.raises(InvalidArgument, match="num_layers is 9"):
        load_model(folder, LoadOptions(num_layers=9))


def test_loading_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="no such folder"):
        load_model(str(tmp_path / "missing"))
    with pytest.raises(InvalidArgument, match="dtype is 'int3'"):
        load_model(save_model(CONFIGS["llama"], tmp_path), LoadOptions(dtype="int3"))


def test_a_step_must_continue_its_cache(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="starts at 3"):
        SessionStep(model.new_cache(), TokenSpan(3, (1,)))
    with pytest.raises(ValueError, match="at least one token"):
        SessionStep(model.new_cache(), TokenSpan(0, ()))
