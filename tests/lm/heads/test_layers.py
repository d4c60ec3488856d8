"""The parts of a head's layer: transformers' own are their reference."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from outrider.lm.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.lm.heads.layers import GatedMlp, RmsNorm, rotary_embedding, rotated

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
POSITIONS = torch.tensor([[0, 1, 77, 400, 4095]])


def config(kind: str = "default", **others: Any) -> LlamaConfig:
    """Returns the configuration of a layer whose positions are rotated in one of the `KINDS`."""
    rope = {"rope_type": kind, "rope_theta": 1e5, **KINDS[kind]}
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters=rope,
        **others,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_rotated_as_by_transformers(kind: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 4, POSITIONS.shape[1], 16)
    rotation = rotary_embedding(config(kind))(rows, POSITIONS)
    wanted = LlamaRotaryEmbedding(config(kind))(rows, POSITIONS)
    assert all(map(torch.equal, rotation, wanted))
    assert torch.equal(rotated(rows, rotation), apply_rotary_pos_emb(rows, rows, *wanted)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_bfloat16_rotates_by_frequencies_in_float32(kind: str) -> None:
    """As in training. With rounded ones a head's attention is off, the more the farther a token is."""
    head = Eagle3Head(Eagle3Config(config(kind), 32, 16)).to(torch.bfloat16)
    rows = torch.empty(1, dtype=torch.float32)
    wanted = LlamaRotaryEmbedding(config(kind))(rows, POSITIONS)
    assert all(map(torch.equal, head.rotary(rows, POSITIONS), wanted))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_gated_unit_is_that_of_transformers(activation: str, has_bias: bool) -> None:
    torch.manual_seed(0)
    given = config(hidden_act=activation, mlp_bias=has_bias)
    unit, wanted = GatedMlp(given), LlamaMLP(given)
    unit.load_state_dict(wanted.state_dict())
    rows = torch.randn(5, 32)
    assert torch.equal(unit(rows), wanted(rows))


@pytest.mark.parametrize("of_rows", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_transformers(of_rows: torch.dtype, of_weight: torch.dtype) -> None:
    """In training, rows are in bfloat16 and weights in float32."""
    torch.manual_seed(0)
    norm, wanted = RmsNorm(32, 1e-5).to(of_weight), LlamaRMSNorm(32, 1e-5).to(of_weight)
    for item in (norm, wanted):
        item.weight.data.copy_(torch.linspace(0.5, 2, 32))
    rows = torch.randn(5, 32).to(of_rows)
    found, expected = norm(rows), wanted(rows)
    assert found.dtype == expected.dtype and torch.allclose(found, expected, rtol=0.01)
