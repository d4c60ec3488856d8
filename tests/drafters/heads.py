"""Tiny heads over made-up features, and what they would draft by the code that trains them."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig

from outrider.drafters.block import BlockDrafter
from outrider.drafters.choices import TreeOptions
from outrider.drafters.drafter import DrafterInfo
from outrider.drafters.eagle3 import Eagle3Drafter, HeadOptions
from outrider.drafters.features import Features
from outrider.drafters.medusa import MedusaDrafter
from outrider.lm.heads.block import BlockConfig, BlockHead
from outrider.lm.heads.block_passes import BlockPasses
from outrider.lm.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.parallel import ParallelHead
from outrider.lm.heads.passes import HeadPasses
from outrider.lm.heads.published import load_published_block
from outrider.lm.heads.vocabulary import DraftVocabulary
from tests.lm.heads.published import MAKES, PublishedHead

V, D, H = 40, 24, 16
BLOCK_SIZE = 5
CPU = torch.device("cpu")
VOCABULARY = DraftVocabulary(torch.arange(0, V, 5).repeat_interleave(3) + torch.arange(3).repeat(8), V)
LAYER = LlamaConfig(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=1,
)


PUBLISHED = {"dflash": 4, "dflash, sliding": 0, "dspark, gated": 2, "peagle": 4}
"""Block heads of others, and seeds by which no two logits of the tests' texts nearly tie."""


def info(kind: str, layers: tuple[int, ...], target: str = "") -> DrafterInfo:
    """Returns the identity of a head's drafter."""
    return DrafterInfo(kind, "tiny", "f", "", "", V, 4096, (), layers, H, target)


@dataclass
class TinyEagle3:
    """A random head whose logits are spread widely, in float32 so that two ways of computing give one ranking."""

    head: Eagle3Head
    embedding: Tensor
    features: Tensor

    @classmethod
    def make(cls, seed: int = 0) -> "TinyEagle3":
        """Returns one with features of 100 positions."""
        torch.manual_seed(seed)
        head = Eagle3Head(Eagle3Config(LAYER, H, D)).requires_grad_(False).eval()
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
        embedding, features = torch.randn(V, H), torch.randn(100, 3 * H)
        return cls(head.bfloat16(), embedding.bfloat16(), features.bfloat16())

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values of a column."""
        return LAYER.num_key_value_heads or 0

    def drafter(
        self, *, chunk: int = 64, budget: int = 1 << 22, tree: TreeOptions | None = None, target: str = ""
    ) -> Eagle3Drafter:
        """Returns a drafter over it."""
        options = HeadOptions(budget, chunk, tree or TreeOptions())
        return Eagle3Drafter(
            HeadPasses(self.head, self.embedding), VOCABULARY, info("eagle3", (0, 1, 2), target), options
        )

    def span(self, start: int, end: int) -> Features:
        """Returns features of positions start .. end - 1 as they come."""
        return Features(start, self.features[start:end])

    def logits(self, token_ids: tuple[int, ...], path: tuple[int, ...] = ()) -> Tensor:
        """Returns the logits behind session and path, [D], as training computes them."""
        text, num_columns = torch.tensor((*token_ids, *path)), len(token_ids) - 1
        ids = functional.pad(text, (0, len(path) + 1))
        embeddings = [
            functional.embedding(ids[step + 1 : step + 1 + num_columns], self.embedding)[None]
            for step in range(len(path) + 1)
        ]
        *_, last = self.head.unroll(self.features[None, :num_columns], embeddings)
        logits: Tensor = self.head.lm_head(last[0, -1])
        return logits.float()


@dataclass
class TinyBlock(TinyEagle3):
    """The same of a block head."""

    head: BlockHead

    @classmethod
    def make(cls, seed: int = 59) -> "TinyBlock":
        """Returns one with features of 100 positions; by this seed no two logits of the tests' texts nearly tie."""
        torch.manual_seed(seed)
        head = BlockHead(BlockConfig(Eagle3Config(LAYER, H, D), BLOCK_SIZE, 8)).requires_grad_(False).eval()
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) / 3)
        embedding, features = torch.randn(V, H), torch.randn(100, 3 * H)
        return cls(head.bfloat16(), embedding.bfloat16(), features.bfloat16())

    def drafter(
        self, *, chunk: int = 64, budget: int = 1 << 22, tree: TreeOptions | None = None, target: str = ""
    ) -> BlockDrafter:
        """Returns a drafter over it."""
        options = HeadOptions(budget, chunk, tree or TreeOptions())
        return BlockDrafter(
            BlockPasses(self.head, self.embedding), VOCABULARY, info("block", (0, 1, 2), target), options
        )

    def logits(self, token_ids: tuple[int, ...], path: tuple[int, ...] = ()) -> Tensor:
        """Returns the logits behind session and path, [D], as training computes them."""
        text, num_columns = torch.tensor(token_ids), len(token_ids) - 1
        anchors = functional.embedding(text[1:], self.embedding)[None]
        states = list(self.head.unroll(self.features[None, :num_columns], [anchors]))[len(path)][0, -1]
        before = self.embedding[(*token_ids, *path)[-1]]
        return self.head.logits(states, before).float()


@dataclass
class TinyPublished(TinyEagle3):
    """The same of a block head of others, read from a checkpoint in its layout, beside transformers' own layers."""

    head: ParallelHead
    like: PublishedHead

    @classmethod
    def read(cls, name: str) -> "TinyPublished":
        """Returns the one of this name."""
        torch.manual_seed(PUBLISHED[name])
        like = MAKES[name](VOCABULARY)
        embedding, features = torch.randn(V, H).bfloat16(), torch.randn(100, 3 * H).bfloat16()
        like.randomise(embedding)
        with TemporaryDirectory() as folder:
            like.save(Path(folder), like.config())
            found = load_published_block(Path(folder))
        assert found is not None
        found[0].share(embedding)
        return cls(found[0], embedding, features, like)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values of a column."""
        return self.head.num_kv_heads

    def drafter(
        self, *, chunk: int = 64, budget: int = 1 << 22, tree: TreeOptions | None = None, target: str = ""
    ) -> BlockDrafter:
        """Returns a drafter over it."""
        options = HeadOptions(budget, chunk, tree or TreeOptions())
        return BlockDrafter(self.head, VOCABULARY, info("block", (1, 2, 3), target), options)

    def logits(self, token_ids: tuple[int, ...], path: tuple[int, ...] = ()) -> Tensor:
        """Returns the logits behind session and path, [D], as transformers' layers compute them."""
        return self.like.logits(self.features[: len(token_ids) - 1], torch.tensor(token_ids), path)


@dataclass
class TinyMedusa:
    """Random heads."""

    heads: MedusaHeads
    features: Tensor

    @classmethod
    def make(cls, num_heads: int = 3) -> "TinyMedusa":
        """Returns them with features of 100 positions."""
        torch.manual_seed(0)
        heads = MedusaHeads(H, num_heads, D).requires_grad_(False).eval()
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter))
        return cls(heads.bfloat16(), torch.randn(100, H).bfloat16())

    def drafter(self, tree: TreeOptions | None = None) -> MedusaDrafter:
        """Returns a drafter over them."""
        return MedusaDrafter(self.heads, VOCABULARY, info("medusa", (7,)), tree or TreeOptions(), CPU)

    def span(self, start: int, end: int) -> Features:
        """Returns features of positions start .. end - 1 as they come."""
        return Features(start, self.features[start:end])

    def logits(self, position: int) -> Tensor:
        """Returns the logits of all guesses from the feature of a position: [K, D]."""
        states = torch.stack(list(self.heads.unroll(self.features[position])))
        logits: Tensor = self.heads.lm_head(states)
        return logits.float()
