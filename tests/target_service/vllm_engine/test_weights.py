"""Fingerprints from a checkpoint's files are those of the loaded model, so that drafts made for it fit both engines."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.lm.fingerprint import weights_fingerprint as of_model
from target_service.vllm_engine.weights import files_fingerprint, weights_fingerprint
from tests.lm.models import SMALL, save_model


@pytest.mark.parametrize("ties_head", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_own_engines_fingerprint(tmp_path: Path, dtype: torch.dtype, ties_head: bool) -> None:
    save_model(LlamaConfig(**SMALL, tie_word_embeddings=ties_head), tmp_path, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert weights_fingerprint(tmp_path, ties_head=ties_head) == of_model(model)


def test_weights_that_are_split_over_files_are_found(tmp_path: Path) -> None:
    save_model(LlamaConfig(**SMALL), tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    model.save_pretrained(tmp_path / "split", max_shard_size="20KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    assert weights_fingerprint(tmp_path / "split", ties_head=False) == of_model(model)


def test_other_weights_and_other_identities_have_other_fingerprints(tmp_path: Path) -> None:
    folders = [Path(save_model(LlamaConfig(**SMALL), tmp_path / str(seed), seed=seed)) for seed in (0, 1)]
    found = {files_fingerprint(folder, identity) for folder in folders for identity in ("a", "b")}
    assert len(found) == 4
    assert len({weights_fingerprint(folder, ties_head=False) for folder in folders}) == 2


def test_weights_that_are_no_safetensors_have_none(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" * 100)
    assert weights_fingerprint(tmp_path, ties_head=False) == ""
    assert files_fingerprint(tmp_path, "a")
