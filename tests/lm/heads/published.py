"""Heads of others by transformers' own layers, and their checkpoints, with the names that these layers have."""

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from outrider.lm.heads.vocabulary import DraftVocabulary

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
MASK_TOKEN_ID = 7


class PublishedHead(nn.Module):
    """A random head. Its weights are rounded to bfloat16, and computed with in float32.

    Args:
        config: of its layers.
        vocabulary: the tokens that it predicts.
        num_features: of a position.
    """

    def __init__(self, config: Any, vocabulary: DraftVocabulary, num_features: int) -> None:
        super().__init__()
        self.layer_config, self.vocabulary, width = config, vocabulary, config.hidden_size
        self.fc = nn.Linear(num_features * width, width, bias=False)
        self.lm_head = nn.Linear(width, len(vocabulary), bias=False)
        self.embedding = torch.empty(0)

    def randomise(self, embedding: Tensor, scale: float = 0.35) -> None:
        """Draw the weights, and take the target's embeddings."""
        self.embedding = embedding.float()
        for parameter in self.requires_grad_(False).parameters():
            drawn = torch.randn_like(parameter)
            parameter.copy_((drawn * scale if parameter.ndim > 1 else 1 + drawn / 4).bfloat16().float())

    @abstractmethod
    def states(self, features: Tensor, token_ids: Tensor) -> Tensor:
        """Returns the normalised outputs of the rows that predict tokens: [block size, H].

        Args:
            features: of all positions but the text's last one: [T, width].
            token_ids: the text's: [T + 1].
        """

    def logits(self, features: Tensor, token_ids: Tensor, path: tuple[int, ...] = ()) -> Tensor:
        """Returns the logits behind a text and a path, [D]."""
        state = self.states(features.float(), token_ids)[len(path)]
        previous = path[-1] if path else int(token_ids[-1])
        logits: Tensor = self.lm_head(state)
        return logits + self.added(state, previous)

    def added(self, state: Tensor, previous: int) -> Tensor:
        """Returns what the token before adds to the logits."""
        return torch.zeros(len(self.vocabulary))

    def save(self, folder: Path, config: dict[str, Any], without: tuple[str, ...] = (), **more: Tensor) -> None:
        """Write a checkpoint.

        Args:
            folder: where.
            config: written as it is.
            without: beginnings of the names of weights that are left out.
            more: further weights.
        """
        maps = {"d2t": self.vocabulary.d2t, "t2d": self.vocabulary.t2d}
        if len(self.vocabulary) == self.vocabulary.target_size:
            maps = {}
        own = {name: item.bfloat16() for name, item in self.state_dict().items()}
        weights = {
            name: item for name, item in (own | more | maps).items() if not without or not name.startswith(without)
        }
        folder.mkdir(exist_ok=True)
        save_file({name: item.contiguous() for name, item in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))

    def fields(self) -> dict[str, Any]:
        """Returns the configuration of the layers, as it is written."""
        fields = self.layer_config.to_dict()
        for name in ("dtype", "layer_types", "sliding_window", "transformers_version"):
            fields.pop(name, None)
        if len(self.vocabulary) < self.vocabulary.target_size:
            fields["draft_vocab_size"] = len(self.vocabulary)
        return fields  # type: ignore[no-any-return]


class DFlash(PublishedHead):
    """DFlash's head, and DSpark's.

    Args:
        vocabulary: the tokens that it predicts.
        num_layers: of the head.
        block_size: rows of a block.
        from_anchor: whether a row predicts the token behind its own.
        markov: `vanilla`, `gated`, or nothing for a head without a Markov head.
        rank: of the Markov head.
        sliding: the window of all layers but the first.
        is_causal: whether rows of those layers attend to no row behind them.
        shape: of the layers.
    """

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        *,
        num_layers: int = 2,
        block_size: int = 6,
        from_anchor: bool = False,
        markov: str = "",
        rank: int = 8,
        sliding: int | None = None,
        is_causal: bool = True,
        shape: Mapping[str, Any] = SHAPE,
    ) -> None:
        size = vocabulary.target_size
        config = Qwen3Config(**shape, vocab_size=size, num_hidden_layers=num_layers, rope_theta=500.0)
        super().__init__(config, vocabulary, 3)
        width, self.rank = config.hidden_size, rank
        self.hidden_norm = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, number) for number in range(num_layers))
        self.norm = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.block_size, self.from_anchor, self.markov = block_size, from_anchor, markov
        self.sliding, self.is_causal = sliding, is_causal
        if markov:
            self.markov_head = nn.Module()
            self.markov_head.markov_w1 = nn.Embedding(size, self.rank)
            self.markov_head.markov_w2 = nn.Linear(self.rank, len(vocabulary), bias=False)
        if markov == "gated":
            self.markov_head.gate_proj = nn.Linear(width + self.rank, self.rank)

    def states(self, features: Tensor, token_ids: Tensor) -> Tensor:
        num, rows = len(features), self.block_size
        context = self.hidden_norm(self.fc(features))[None]
        ids = torch.tensor([int(token_ids[-1]), *[MASK_TOKEN_ID] * (rows - 1)])
        hidden = functional.embedding(ids, self.embedding)[None]
        cosine, sine = self.rotary(hidden, torch.arange(num + rows)[None])
        distance = torch.arange(num, num + rows)[:, None] - torch.arange(num + rows)
        cache = DynamicCache()
        for number, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            key, value = (
                projection(context).view(1, num, -1, attention.head_dim).transpose(1, 2)
                for projection in (attention.k_proj, attention.v_proj)
            )
            key = attention.k_norm(key)
            cache.update(apply_rotary_pos_emb(key, key, cosine[:, :num], sine[:, :num])[1], value, number)
            hidden_by = torch.zeros_like(distance, dtype=torch.bool)
            if self.sliding is not None and number:
                hidden_by = distance.abs() >= self.sliding
                hidden_by = hidden_by | (distance < 0) if self.is_causal else hidden_by
            mask = torch.zeros(1, 1, *distance.shape).masked_fill(hidden_by, -torch.inf)
            rotation = cosine[:, num:], sine[:, num:]
            # By place, as the cache's name differs between versions.
            hidden = layer(hidden, mask, None, cache, False, rotation)
        states: Tensor = self.norm(hidden)[0]
        return states if self.from_anchor else states[1:]

    def added(self, state: Tensor, previous: int) -> Tensor:
        if not self.markov:
            return super().added(state, previous)
        markov: Any = self.markov_head
        embedded = markov.markov_w1.weight[previous]
        if self.markov == "gated":
            embedded = embedded * torch.sigmoid(markov.gate_proj(torch.cat([state, embedded])))
        added: Tensor = markov.markov_w2(embedded)
        return added

    def config(self) -> dict[str, Any]:
        """Returns the configuration in the authors' layout."""
        own: dict[str, Any] = self.fields() | self._kinds() | {"block_size": self.block_size}
        if self.sliding is not None and not self.is_causal:
            own["is_causal"] = False
        target = {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, 1, 2]}
        if not self.markov:
            return own | {"architectures": ["DFlashDraftModel"], "dflash_config": target}
        markov = {"markov_rank": self.rank, "markov_head_type": self.markov, "enable_confidence_head": True}
        return own | target | markov | {"architectures": ["Qwen3DSparkModel"]}

    def speculators_config(self) -> dict[str, Any]:
        """Returns the configuration in the layout of vLLM's speculators."""
        layer = self.fields() | self._kinds()
        layer.pop("draft_vocab_size", None)
        config: dict[str, Any] = {
            "speculators_model_type": "dspark" if self.markov else "dflash",
            "transformer_layer_config": layer,
            "draft_vocab_size": len(self.vocabulary),
            "block_size": self.block_size,
            "aux_hidden_state_layer_ids": [1, 2, 3],
            "mask_token_id": MASK_TOKEN_ID,
            "target_hidden_size": None,
            "sliding_window_non_causal": not self.is_causal,
        }
        if self.markov:
            markov = {"markov_rank": self.rank, "markov_head_type": self.markov}
            config |= markov | {"sample_from_anchor": self.from_anchor}
        return config

    def _kinds(self) -> dict[str, Any]:
        kind = "full_attention" if self.sliding is None else "sliding_attention"
        kinds = ["full_attention", *[kind] * (len(self.layers) - 1)]
        return {"layer_types": kinds, "sliding_window": self.sliding}


class PEagle(PublishedHead):
    """P-EAGLE's head.

    Args:
        vocabulary: the tokens that it predicts.
        num_layers: of the head.
        block_size: tokens that it predicts.
        shape: of the layers.
    """

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        *,
        num_layers: int = 2,
        block_size: int = 5,
        shape: Mapping[str, Any] = SHAPE,
    ) -> None:
        size = vocabulary.target_size
        config = LlamaConfig(**shape, vocab_size=size, num_hidden_layers=num_layers, rope_theta=500.0)
        super().__init__(config, vocabulary, 3)
        width, eps = config.hidden_size, config.rms_norm_eps
        first: Any = nn.Module()
        first.self_attn, first.mlp = LlamaAttention(config, 0), LlamaMLP(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(
                first.self_attn, name, nn.Linear(2 * width, getattr(first.self_attn, name).out_features, bias=False)
            )
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(first, name, LlamaRMSNorm(width, eps))
        self.layers = nn.ModuleList([first, *(LlamaDecoderLayer(config, number) for number in range(1, num_layers))])
        self.norm = LlamaRMSNorm(width, eps)
        self.rotary = LlamaRotaryEmbedding(config)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 3 * width))
        self.block_size = block_size

    def states(self, features: Tensor, token_ids: Tensor) -> Tensor:
        num_masks = self.block_size - 1
        ids = torch.cat([token_ids[1:], torch.full((num_masks,), MASK_TOKEN_ID)])
        fused = self.fc(torch.cat([features, self.mask_hidden.expand(num_masks, -1)]))[None]
        num = len(ids)
        rotation = self.rotary(fused, torch.arange(num)[None])
        mask = torch.full((1, 1, num, num), -torch.inf).triu(1)
        first: Any = self.layers[0]
        embedded = first.input_layernorm(functional.embedding(ids, self.embedding)[None])
        inputs = torch.cat([embedded, first.hidden_norm(fused)], dim=-1)
        hidden = fused + first.self_attn(inputs, attention_mask=mask, position_embeddings=rotation)[0]
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in self.layers[1:]:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotation)
        states: Tensor = self.norm(hidden)[0, -self.block_size :]
        return states

    def config(self) -> dict[str, Any]:
        """Returns the configuration as vLLM has it."""
        named = {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": MASK_TOKEN_ID, "parallel_drafting": True}
        return self.fields() | named | {"num_depths": self.block_size, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}

    def speculators_config(self) -> dict[str, Any]:
        """Returns the configuration in the layout of vLLM's speculators."""
        layer = self.fields()
        layer.pop("draft_vocab_size", None)
        proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.block_size}]}
        return {
            "speculators_model_type": "peagle",
            "architectures": ["PEagleSpeculator"],
            "transformer_layer_config": layer,
            "speculators_config": proposals,
            "draft_vocab_size": len(self.vocabulary),
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "mask_token_id": MASK_TOKEN_ID,
        }


MAKES: dict[str, Callable[[DraftVocabulary], "DFlash | PEagle"]] = {
    "dflash": lambda vocabulary: DFlash(vocabulary),
    "dflash, sliding": lambda vocabulary: DFlash(vocabulary, num_layers=3, sliding=5),
    "dflash, sliding both ways": lambda vocabulary: DFlash(vocabulary, sliding=4, is_causal=False),
    "dspark": lambda vocabulary: DFlash(vocabulary, from_anchor=True, block_size=5, markov="vanilla"),
    "dspark, gated": lambda vocabulary: DFlash(vocabulary, from_anchor=True, block_size=5, markov="gated"),
    "peagle": lambda vocabulary: PEagle(vocabulary),
    "peagle of one layer": lambda vocabulary: PEagle(vocabulary, num_layers=1),
}
"""Makes of heads by name."""
