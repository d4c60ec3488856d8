"""Checkpoints of heads: compatible with the published layouts, and rejected with a reason if invalid."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ModelUnsupported
from outrider.lm.heads.checkpoint import (
    DraftManifest,
    load_eagle3,
    load_manifest,
    load_medusa,
    load_vocabulary,
    save_eagle3,
    save_medusa,
    save_vocabulary,
)
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.vocabulary import DraftVocabulary
from tests.lm.heads.models import WIDTH, make_head

VOCABULARY = DraftVocabulary(torch.arange(0, 64, 4), 64)
MANIFEST = DraftManifest("eagle3", "a target", "f" * 64, "t" * 64, WIDTH, (1, 2, 3), 4, False)


def _same(head: torch.nn.Module, other: torch.nn.Module) -> bool:
    own, others = head.state_dict(), other.state_dict()
    return own.keys() == others.keys() and all(torch.equal(own[name].bfloat16(), others[name]) for name in own)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Eagle3Head]:
    head = make_head()
    save_eagle3(tmp_path, head, VOCABULARY, MANIFEST)
    return tmp_path, head


def test_a_head_comes_back(saved: tuple[Path, Eagle3Head]) -> None:
    folder, head = saved
    again, vocabulary = load_eagle3(folder)
    assert _same(head, again)
    assert torch.equal(vocabulary.token_ids, VOCABULARY.token_ids)
    assert load_manifest(folder) == MANIFEST


def test_weights_and_configuration_are_called_as_others_call_them(saved: tuple[Path, Eagle3Head]) -> None:
    folder, _ = saved
    names = set(load_file(folder / "model.safetensors"))
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} < names
    assert {"midlayer.self_attn.q_proj.weight", "midlayer.hidden_norm.weight", "midlayer.mlp.up_proj.weight"} < names
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (16, 64)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_a_head_in_the_speculators_layout_is_read(saved: tuple[Path, Eagle3Head]) -> None:
    folder, head = saved
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): item for name, item in weights.items()}
    renamed["embed_tokens.weight"] = torch.zeros(64, WIDTH)
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    nested = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 16,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "transformer_layer_config": config,
    }
    (folder / "config.json").write_text(json.dumps(nested))
    (folder / "outrider_draft.json").unlink()
    again, _ = load_eagle3(folder)
    assert _same(head, again) and again.config.norm_before_residual
    assert load_manifest(folder) is None


def test_a_published_pickle_is_read(saved: tuple[Path, Eagle3Head]) -> None:
    folder, head = saved
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert _same(head, load_eagle3(folder)[0])


def test_a_trimmed_head_takes_its_output_layer_from_the_target(tmp_path: Path) -> None:
    head = make_head()
    save_eagle3(tmp_path, head, VOCABULARY, replace(MANIFEST, trimmed=True))
    with pytest.raises(ModelUnsupported, match="without its output layer"):
        load_eagle3(tmp_path)
    rows = torch.randn(64, WIDTH)
    again, _ = load_eagle3(tmp_path, lambda token_ids: rows[token_ids])
    assert torch.equal(again.lm_head.weight, rows[VOCABULARY.token_ids].bfloat16())


@pytest.mark.parametrize(
    ("drop", "message"),
    [("d2t", "map d2t is missing"), ("t2d", "map t2d is missing"), ("midlayer.mlp.up_proj.weight", "mlp.up_proj")],
)
def test_a_missing_part_is_named(saved: tuple[Path, Eagle3Head], drop: str, message: str) -> None:
    folder, _ = saved
    weights = load_file(folder / "model.safetensors")
    del weights[drop]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=message):
        load_eagle3(folder)


def test_a_wrong_width_is_named(saved: tuple[Path, Eagle3Head]) -> None:
    folder, _ = saved
    config = json.loads((folder / "config.json").read_text())
    config["target_hidden_size"] = 2 * WIDTH
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnsupported, match=r"fc\.weight has shape \[32, 96\].*\[32, 192\]"):
        load_eagle3(folder)


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"config\.json"):
        load_eagle3(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnsupported, match="no weights"):
        load_eagle3(tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("no")
    with pytest.raises(ModelUnsupported, match="no weights"):
        load_eagle3(tmp_path)


def test_a_damaged_manifest_is_refused(saved: tuple[Path, Eagle3Head]) -> None:
    folder, _ = saved
    (folder / "outrider_draft.json").write_text('{"format": 1}')
    with pytest.raises(ModelUnsupported, match="damaged"):
        load_manifest(folder)


def test_medusas_heads_come_back_under_their_published_names(tmp_path: Path) -> None:
    heads = MedusaHeads(WIDTH, 3, 16)
    torch.nn.init.normal_(heads.heads[1].linear.weight)  # type: ignore[union-attr,arg-type]
    save_medusa(tmp_path, heads, VOCABULARY, replace(MANIFEST, method="medusa"))
    assert "1.0.linear.weight" in load_file(tmp_path / "model.safetensors")
    again, vocabulary = load_medusa(tmp_path)
    assert _same(heads, again) and len(vocabulary) == 16


def test_a_map_beside_an_ordinary_checkpoint_comes_back(tmp_path: Path) -> None:
    assert load_vocabulary(tmp_path) is None
    save_vocabulary(tmp_path, VOCABULARY)
    again = load_vocabulary(tmp_path)
    assert again is not None and torch.equal(again.token_ids, VOCABULARY.token_ids)
