"""The embedded model."""

from pathlib import Path

import pytest
import torch

from outrider.errors import ModelUnsupported
from outrider.lm.embedded import ensure_embedded, head_folder
from outrider.lm.loading import load_model
from outrider.lm.model import SessionStep
from outrider.tokens import TokenSpan
from tests.proposals import chain

pytestmark = [pytest.mark.embedded, pytest.mark.usefixtures("two_threads")]


def test_the_embedded_model_is_invariant_and_has_its_tokenizer() -> None:
    loaded = load_model("embedded")
    info = loaded.model.info
    assert info.numerics.endswith(" invariant")
    assert (info.vocabulary_size, info.eos_token_ids) == (49152, (2,))
    assert loaded.tokenizer is not None
    assert set(loaded.tokenizer.files) == {"tokenizer.json", "chat_template.jinja", "special_tokens.json"}
    assert loaded.tokenizer.fingerprint == info.tokenizer_fingerprint


def test_many_shapes_give_equal_bits_in_bfloat16() -> None:
    model = load_model("embedded").model
    tokens = tuple(range(1000, 1300))
    whole = model.forward([SessionStep(model.new_cache(), TokenSpan(0, tokens))])[0][0]
    for cut in (299, 290, 150):
        cache = model.new_cache()
        model.forward([SessionStep(cache, TokenSpan(0, tokens[:cut]), chain((5, 6, 7)))])
        assert torch.equal(model.forward([SessionStep(cache, TokenSpan(cut, tokens[cut:]))])[0][0], whole), cut


def test_the_conversion_is_kept() -> None:
    folder = ensure_embedded()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert (ensure_embedded() / "model.safetensors").stat().st_mtime_ns == before


def test_a_model_that_the_environment_brings_comes_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ensure_embedded().name
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    shipped = tmp_path / "share" / "outrider" / name
    assert ensure_embedded() != shipped
    shipped.mkdir(parents=True)
    assert ensure_embedded() == shipped


def test_a_head_that_the_embedded_model_has_not_is_named() -> None:
    assert (head_folder("block") / "config.json").is_file()
    with pytest.raises(ModelUnsupported, match="comes with heads of kind block and eagle3, not medusa"):
        head_folder("medusa")
