"""Models whose rows affect each other are not called invariant."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig

from outrider.lm.loading import load_model
from outrider.lm.rows import has_experts, scales_by_longest
from tests.lm.models import SMALL, save_model


def _rope(kind: str) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(("kind", "is_invariant"), [("dynamic", False), ("linear", True)])
def test_a_rotary_embedding_scaled_by_the_longest_session_varies(tmp_path: Path, kind: str, is_invariant: bool) -> None:
    folder = save_model(LlamaConfig(**SMALL, rope_parameters=_rope(kind)), tmp_path)
    assert load_model(folder).model.info.numerics.endswith(" invariant") is is_invariant


class Model:
    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config


def test_what_a_configuration_says() -> None:
    dense, sparse = Model(LlamaConfig(**SMALL)), Model(MixtralConfig(**SMALL, num_local_experts=4))
    assert (has_experts(dense), has_experts(sparse)) == (False, True)  # type: ignore[arg-type]
    assert not scales_by_longest(dense)  # type: ignore[arg-type]
    # By kind of layer, one within another.
    each = {"full_attention": _rope("default"), "sliding_attention": _rope("longrope")}
    dense.config.rope_parameters = each
    assert scales_by_longest(dense)  # type: ignore[arg-type]
