"""Heads from folders: what fits is loaded, what does not is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider import native
from outrider.drafters.eagle3 import Eagle3Drafter
from outrider.drafters.loading import load_drafter
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.options import DrafterKind, DrafterOptions
from outrider.errors import ModelUnsupported
from outrider.lm.fingerprint import weights_fingerprint
from outrider.lm.heads.checkpoint import DraftManifest, save_eagle3, save_medusa
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.shared import read_shared
from outrider.lm.heads.vocabulary import DraftVocabulary
from tests.lm.heads.models import WIDTH, make_head
from tests.lm.models import CONFIGS, SMALL, save_model
from tests.native.byte_reference import byte_product

VOCABULARY = DraftVocabulary(torch.arange(0, 64, 4), 64)


@pytest.fixture
def target(tmp_path: Path) -> str:
    return save_model(CONFIGS["llama"], tmp_path / "target")


def manifest(target: str, method: str = "eagle3") -> DraftManifest:
    fingerprint = weights_fingerprint(AutoModelForCausalLM.from_pretrained(target))
    return DraftManifest(method, target, fingerprint, "t" * 64, WIDTH, (0, 1, 2), 4, trimmed=True)


@pytest.fixture
def head(tmp_path: Path, target: str) -> Path:
    save_eagle3(tmp_path / "head", make_head(), VOCABULARY, manifest(target))
    return tmp_path / "head"


def settings(folder: Path, kind: DrafterKind = DrafterKind.EAGLE3, target: str = "") -> DrafterOptions:
    return DrafterOptions(drafter=kind, model=str(folder), target=target, device="cpu")


def test_a_trimmed_head_takes_the_rest_from_its_target(head: Path, target: str) -> None:
    drafter = load_drafter(settings(head))
    assert isinstance(drafter, Eagle3Drafter)
    info = drafter.info
    assert (info.drafter, info.vocabulary_size, info.feature_layers, info.hidden_size) == (
        "eagle3",
        64,
        (0, 1, 2),
        WIDTH,
    )
    assert info.target_fingerprint == manifest(target).target_fingerprint
    assert info.eos_token_ids == (SMALL["eos_token_id"],)
    is_native = native.best_variant() is not None
    assert info.numerics.startswith("cpu bytes torch-" if is_native else "cpu bfloat16 torch-")
    rows = AutoModelForCausalLM.from_pretrained(target).lm_head.weight[VOCABULARY.token_ids]
    rows = rows.detach().bfloat16().float()
    states = torch.randn(4, WIDTH).bfloat16()
    normed, logits = drafter._passes.logits(states)
    expected = byte_product(normed, rows) if is_native else normed.float() @ rows.T
    torch.testing.assert_close(logits, expected.bfloat16(), atol=1e-3, rtol=1 / 64)


def test_medusas_heads_are_loaded(tmp_path: Path, target: str) -> None:
    save_medusa(tmp_path, MedusaHeads(WIDTH, 3, 16), VOCABULARY, manifest(target, "medusa"))
    drafter = load_drafter(settings(tmp_path, DrafterKind.MEDUSA))
    assert isinstance(drafter, MedusaDrafter)
    assert drafter.info.feature_layers == (3,)  # what the output layer takes


def test_a_head_of_others_needs_to_be_told_its_target(head: Path, target: str) -> None:
    (head / "outrider_draft.json").unlink()
    with pytest.raises(ModelUnsupported, match="OUTRIDER_TARGET"):
        load_drafter(settings(head))
    info = load_drafter(settings(head, target=target)).info
    assert (info.target_fingerprint, info.feature_layers) == ("", (0, 1, 2))


def test_another_kind_of_head_is_named(head: Path) -> None:
    with pytest.raises(ModelUnsupported, match="of kind eagle3, not medusa"):
        load_drafter(settings(head, DrafterKind.MEDUSA))


def test_a_target_of_another_width_is_named(head: Path, tmp_path: Path) -> None:
    wide = save_model(LlamaConfig(**{**SMALL, "hidden_size": 48}), tmp_path / "wide")
    with pytest.raises(ModelUnsupported, match="takes features of 32 numbers, the target has 48"):
        load_drafter(settings(head, target=wide))


def test_a_target_of_another_vocabulary_is_named(head: Path, tmp_path: Path) -> None:
    large = save_model(LlamaConfig(**{**SMALL, "vocab_size": 80}), tmp_path / "large")
    with pytest.raises(ModelUnsupported, match="has 64 tokens, the target has 80"):
        load_drafter(settings(head, target=large))


def test_a_missing_map_is_named(head: Path) -> None:
    weights = load_file(head / "model.safetensors")
    del weights["d2t"]
    save_file(weights, head / "model.safetensors")
    with pytest.raises(ModelUnsupported, match="its map d2t is missing"):
        load_drafter(settings(head))


def test_a_target_that_is_not_there_is_named(head: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"cannot read the target .*nowhere"):
        load_drafter(settings(head, target=str(head / "nowhere")))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_the_ends_of_a_target_are_read_without_it(tmp_path: Path, *, tied: bool, shard: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path, max_shard_size=shard)
    shared = read_shared(str(tmp_path))
    assert torch.equal(shared.embedding, model.get_input_embeddings().weight)
    assert torch.equal(shared.output_layer, model.get_output_embeddings().weight)
    assert (shared.num_layers, shared.max_len) == (3, 2048)


@pytest.mark.parametrize("kind", [DrafterKind.EAGLE3, DrafterKind.MEDUSA], ids=lambda kind: kind.value)
def test_numerics_name_the_device_that_runs_the_head(kind: DrafterKind, tmp_path: Path, target: str) -> None:
    """On a device without memory, which every machine has; it was the CPU, where heads are loaded."""
    described = manifest(target, kind.value)
    if kind is DrafterKind.EAGLE3:
        save_eagle3(tmp_path / "head", make_head(), VOCABULARY, described)
    else:
        save_medusa(tmp_path / "head", MedusaHeads(WIDTH, 3, 16), VOCABULARY, described)
    drafter = load_drafter(settings(tmp_path / "head", kind).model_copy(update={"device": "meta"}))
    assert drafter.info.numerics.split()[0] == "meta"
    assert load_drafter(settings(tmp_path / "head", kind)).info.numerics.split()[0] == "cpu"


def test_a_target_is_the_same_in_another_dtype_and_not_with_other_weights(target: str, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(target)
    half = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    assert weights_fingerprint(whole) == weights_fingerprint(half)
    other = AutoModelForCausalLM.from_pretrained(save_model(CONFIGS["llama"], tmp_path / "other", seed=1))
    assert weights_fingerprint(whole) != weights_fingerprint(other)
