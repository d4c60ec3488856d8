"""EAGLE-3's head: training at all columns equals drafting at one column."""

import pytest
import torch
from torch import Tensor

from outrider.lm.heads.eagle3 import Eagle3Head, chain_attention
from tests.lm.heads.models import WIDTH, make_head

LENGTH, DEPTH = 7, 3


def _drafted(head: Eagle3Head, features: Tensor, embeddings: list[Tensor], column: int) -> list[Tensor]:
    """Draft from one column as a service does: prefill with features, then single steps on own outputs."""
    layer = head.midlayer
    positions = torch.arange(column + 1)[None]
    hidden = head.fc(features[:, : column + 1])
    keys = values = torch.empty(0)
    outputs = []
    for step, embedded in enumerate(embeddings):
        inputs = embedded[:, : column + 1] if step == 0 else embedded[:, column : column + 1]
        where = positions if step == 0 else positions[:, -1:] + step
        normed = layer.hidden_norm(hidden)
        residual = normed if layer.norm_before_residual else hidden
        joined = torch.cat([layer.input_layernorm(inputs), normed], -1)
        query, key, value = layer.self_attn.project(joined, head.rotary(hidden, where))
        keys = key if step == 0 else torch.cat([keys, key], 2)
        values = value if step == 0 else torch.cat([values, value], 2)
        mask = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - query.shape[2])
        attended = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
        hidden = residual + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        hidden = (hidden + layer.mlp(layer.post_attention_layernorm(hidden)))[:, -1:]
        outputs.append(head.norm(hidden)[:, 0])
    return outputs


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_unrolling_is_drafting_at_every_column(norm_before_residual: bool) -> None:
    head = make_head(norm_before_residual)
    features = torch.randn(2, LENGTH, 3 * WIDTH, dtype=torch.float64)
    embeddings = [torch.randn(2, LENGTH, WIDTH, dtype=torch.float64) for _ in range(DEPTH)]
    unrolled = list(head.unroll(features, embeddings))
    for column in range(LENGTH):
        for step, drafted in enumerate(_drafted(head, features, embeddings, column)):
            assert torch.allclose(unrolled[step][:, column], drafted, atol=1e-5), (column, step)


def test_a_column_does_not_depend_on_later_ones() -> None:
    head = make_head()
    features = torch.randn(1, LENGTH, 3 * WIDTH, dtype=torch.float64)
    embeddings = [torch.randn(1, LENGTH, WIDTH, dtype=torch.float64) for _ in range(DEPTH)]
    whole = list(head.unroll(features, embeddings))
    part = list(head.unroll(features[:, :4], [item[:, :4] for item in embeddings]))
    for one, other in zip(whole, part, strict=True):
        assert torch.allclose(one[:, :4], other, atol=1e-5)


def test_chain_attention_of_one_step_is_causal_attention() -> None:
    query = torch.randn(2, 4, LENGTH, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, LENGTH, 8, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.allclose(chain_attention(query, [(key, value)]), expected.transpose(1, 2).flatten(2), atol=1e-6)
