"""Block heads of others: read as they are published, they say what transformers' own layers say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.drafters.columns import HeadState
from outrider.errors import ModelUnsupported
from outrider.lm.heads.checkpoint import feature_layers_of
from outrider.lm.heads.columns import Columns
from outrider.lm.heads.dflash import DFlashHead, LayerKind
from outrider.lm.heads.parallel import ParallelHead
from outrider.lm.heads.published import load_published_block
from outrider.lm.heads.vocabulary import DraftVocabulary
from tests.lm.heads.published import MAKES, MASK_TOKEN_ID, SHAPE, DFlash, PEagle

V, H = 40, SHAPE["hidden_size"]
VOCABULARY = DraftVocabulary(torch.arange(1, V, 2), V)
WHOLE = DraftVocabulary(torch.arange(V), V)
SLIDING = "sliding_attention"


def proposing(num_tokens: int) -> dict[str, object]:
    """Returns what vLLM's speculators write of a head that proposes so many tokens."""
    return {"proposal_methods": [{"speculative_tokens": num_tokens}]}


@pytest.fixture
def embedding() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(V, H).bfloat16()


@pytest.fixture(params=MAKES)
def made(request: pytest.FixtureRequest, embedding: Tensor) -> DFlash | PEagle:
    head = MAKES[request.param](VOCABULARY)
    head.randomise(embedding)
    return head


def load(folder: Path, embedding: Tensor) -> ParallelHead:
    """Returns the head in a folder in float32, but not packed: to compare its formulas with those of others."""
    found = load_published_block(folder, lambda token_ids: embedding[token_ids])
    assert found is not None
    head = found[0].float()
    head._embedding = head.embed_tokens.weight if head.config.has_embedding else embedding.float()
    return head


def states_of(head: ParallelHead, texts: list[tuple[Tensor, Tensor]], chunk: int) -> list[Tensor]:
    """Returns the states behind texts, each features and tokens, whose columns are run in parts, all texts together."""
    caches = [HeadState(head.num_kv_heads, head.head_dim, 3 * H, torch.device("cpu")) for _ in texts]
    for cache in caches:
        cache.keys, cache.values = cache.keys.float(), cache.values.float()
    found: dict[int, Tensor] = {}
    for first in range(0, max(len(features) for features, _ in texts), chunk):
        open_ones = [place for place, (features, _) in enumerate(texts) if first < len(features)]
        rows = []
        for place in open_ones:
            features, token_ids = texts[place]
            end = min(first + chunk, len(features))
            ends = end == len(features)
            ids = token_ids[first + 1 : end + 1].tolist()
            rows.append(Columns(features[first:end], ids, first, head.block_size - 1 if ends else 0, ends_text=ends))
        outputs = head.run([caches[place] for place in open_ones], rows)
        found |= {place: output for place, row, output in zip(open_ones, rows, outputs, strict=True) if row.ends_text}
    return [head.logits(found[place])[0] for place in range(len(texts))]


@pytest.mark.parametrize("layout", ["authors", "speculators"])
def test_a_block_is_that_of_transformers_layers(
    made: DFlash | PEagle, embedding: Tensor, tmp_path: Path, layout: str
) -> None:
    made.save(tmp_path, made.config() if layout == "authors" else made.speculators_config())
    head = load(tmp_path, embedding)
    assert feature_layers_of(tmp_path, 12) == (1, 2, 3)
    texts = [(torch.randn(num, 3 * H), torch.randint(V, (num + 1,))) for num in (13, 1, 6)]
    for chunk in (4, 20):
        for found, (features, token_ids) in zip(states_of(head, texts, chunk), texts, strict=True):
            expected = made.states(features, token_ids)
            assert found.shape == expected.shape and len(found) == head.block_size
            assert torch.allclose(found, expected, atol=1e-4)


def test_the_token_before_adds_what_a_markov_head_says(
    made: DFlash | PEagle, embedding: Tensor, tmp_path: Path
) -> None:
    made.save(tmp_path, made.config())
    head = load(tmp_path, embedding)
    states, rows, before = torch.randn(4, H), [0, 2, 2, 3], [5, 39, 0, 1]
    logits = head.lm_head(states)
    found = head.transition.logits(logits, head.transition.states(states), rows, before)
    expected = torch.stack(
        [logits[row] + made.added(states[row], token) for row, token in zip(rows, before, strict=True)]
    )
    assert torch.allclose(found, expected, atol=1e-5)


def test_embeddings_and_output_layer_are_the_targets_where_there_are_none(embedding: Tensor, tmp_path: Path) -> None:
    made = DFlash(WHOLE)
    made.randomise(embedding)
    made.save(tmp_path, made.config(), without=("lm_head",))
    assert torch.equal(load(tmp_path, embedding).lm_head.weight, embedding.float())
    own = torch.randn(V, H).bfloat16()
    config = made.config() | {"input_embedding_scale": 2.0}
    made.save(tmp_path, config, **{"embed_tokens.weight": own, "mask_embedding": own[0].clone()})
    head = load(tmp_path, embedding)
    assert torch.equal(head._embedding, own.float())
    made.embedding = 2 * own.float()
    made.embedding[MASK_TOKEN_ID] = made.embedding[0]
    features, token_ids = torch.randn(5, 3 * H), torch.tensor([1, 2, 3, 4, 5, 6])
    [found] = states_of(head, [(features, token_ids)], 8)
    assert torch.allclose(found, made.states(features, token_ids), atol=1e-4)


def test_a_confidence_head_is_not_needed(embedding: Tensor, tmp_path: Path) -> None:
    made = MAKES["dspark"](VOCABULARY)
    made.randomise(embedding)
    made.save(tmp_path, made.config(), **{"confidence_head.proj.weight": torch.zeros(1, H + 8)})
    assert load(tmp_path, embedding).block_size == 5


def test_weights_may_be_those_of_a_whole_model(made: DFlash | PEagle, embedding: Tensor, tmp_path: Path) -> None:
    made.save(tmp_path, made.config())
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"model.{name}": item for name, item in weights.items()}, tmp_path / "model.safetensors")
    assert load(tmp_path, embedding).block_size == 5


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        ("dflash", {"block_size": None}, "no block_size"),
        ("dflash", {"block_size": "x"}, "block_size is 'x'"),
        ("dflash", {"block_size": 1}, "block_size 1 predicts no token"),
        ("dflash", {"model_type": "mamba"}, "model_type mamba"),
        ("dflash", {"hidden_act": "unknown"}, "hidden_act 'unknown'"),
        ("dflash", {"hidden_size": "16"}, "hidden_size"),
        ("dflash", {"num_attention_heads": 0}, "is not valid"),
        ("dflash", {"dflash_config": "x"}, "is not valid"),
        ("dflash", {"dflash_config": {"mask_token_id": 1}}, "target_layer_ids"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "mask_token_id"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 1}}, r"fc\.weight has shape"),
        ("dflash", {"layer_types": [SLIDING] * 2}, "sliding_window"),
        ("dflash", {"layer_types": [SLIDING] * 2, "sliding_window": -3}, "sliding_window is -3"),
        ("dflash", {"layer_types": [SLIDING]}, "2 layers with layer_types sliding_attention"),
        ("dflash", {"layer_types": ["chunked_attention"] * 2}, "layer_types chunked_attention"),
        ("dflash", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ("dflash", {"shift_label": True}, "shift_label True"),
        ("dflash", {"num_hidden_layers": 1}, r"layout that is not read: layers\.1"),
        ("dflash", {"num_hidden_layers": 3, "layer_types": None}, r"lacks the weight layers\.2"),
        ("dflash", {"vocab_size": 48}, "t2d has 40 tokens, vocab_size is 48"),
        ("dspark", {"markov_head_type": "rnn"}, "markov_head_type 'rnn'"),
        ("dspark", {"markov_rank": None}, "markov_rank"),
        ("dspark", {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ("dspark", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "own for full_attention"),
        ("dspark", {"rope_parameters": {"rope_type": "unknown"}}, "unknown"),
        ("peagle", {"logit_scale": 0.5}, "logit_scale 0.5"),
        ("peagle", {"ptd_token_id": "no"}, "ptd_token_id is 'no'"),
        ("peagle", {"num_depths": -1}, "num_depths -1"),
        ("peagle", {"layer_types": [SLIDING] * 2}, "sliding_attention"),
        ("peagle", {"is_causal": False}, "not causal"),
        ("peagle", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}, r"mask_hidden has shape \[1, 48\]"),
        ("peagle", {"num_hidden_layers": 3}, r"lacks the weight layers\.2"),
    ],
)
def test_what_is_missing_or_not_read_is_named(
    embedding: Tensor, tmp_path: Path, make: str, change: dict[str, object], message: str
) -> None:
    made = MAKES[make](VOCABULARY)
    made.randomise(embedding)
    config = {name: value for name, value in (made.config() | change).items() if value is not None}
    made.save(tmp_path, config)
    with pytest.raises(ModelUnsupported, match=message):
        load(tmp_path, embedding)


def test_a_head_without_its_masks_feature_is_refused(embedding: Tensor, tmp_path: Path) -> None:
    made = MAKES["peagle"](VOCABULARY)
    made.randomise(embedding)
    made.save(tmp_path, made.config(), without=("mask_hidden",))
    with pytest.raises(ModelUnsupported, match="lacks the weight mask_hidden"):
        load(tmp_path, embedding)


@pytest.mark.parametrize(
    ("change", "num_tokens"),
    [
        ({"sample_from_anchor": None}, 5),
        ({"sample_from_anchor": False}, 4),
        ({"dspark_bonus_anchor": True}, 4),
        ({"speculators_model_type": "dspark", "sample_from_anchor": False}, 4),
        ({"speculators_model_type": "dspark", "speculators_config": proposing(5)}, 5),
        ({"speculators_model_type": "dspark", "speculators_config": proposing(4)}, 4),
    ],
)
def test_whether_the_anchors_row_predicts_a_token(
    embedding: Tensor, tmp_path: Path, change: dict[str, object], num_tokens: int
) -> None:
    made = MAKES["dspark"](VOCABULARY)
    made.randomise(embedding)
    made.save(tmp_path, made.config() | change)
    assert load(tmp_path, embedding).block_size == num_tokens
    made.save(tmp_path, made.config() | {"speculators_model_type": "dspark"})
    with pytest.raises(ModelUnsupported, match="no sample_from_anchor"):
        load(tmp_path, embedding)


def test_older_configurations_have_sliding_layers_by_their_number(embedding: Tensor, tmp_path: Path) -> None:
    made = DFlash(VOCABULARY, num_layers=3, sliding=5)
    made.randomise(embedding)
    config = made.config() | {"use_sliding_window": True, "max_window_layers": 1}
    del config["layer_types"]
    made.save(tmp_path, config)
    head = load(tmp_path, embedding)
    assert isinstance(head, DFlashHead)
    assert head.config.kinds == (LayerKind(False, None), LayerKind(True, 5), LayerKind(True, 5))


def test_layers_and_tokens_that_the_target_has_not_are_named(embedding: Tensor, tmp_path: Path) -> None:
    made = DFlash(WHOLE)
    made.randomise(embedding)
    made.save(tmp_path, made.config(), without=("lm_head",))
    with pytest.raises(ModelUnsupported, match="predicts the token 39, which the target has not"):
        load(tmp_path, embedding[:30])
    with pytest.raises(ModelUnsupported, match="features of target layers 1, 2, 3, the target has 2"):
        feature_layers_of(tmp_path, 2)


def test_other_folders_are_not_of_such_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    assert load_published_block(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"), [({}, "embeddings have 8 numbers, not 16"), ({"mask_token_id": 40}, "mask token 40")]
)
def test_embeddings_that_do_not_fit_are_refused(
    embedding: Tensor, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    made = MAKES["dspark"](VOCABULARY)
    made.randomise(embedding)
    made.save(tmp_path, made.config() | change)
    found = load_published_block(tmp_path)
    assert found is not None
    with pytest.raises(ModelUnsupported, match=message):
        found[0].share(embedding if change else embedding[:, :8])
