"""The kinds of drafts in training: predictions at every column of a text."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel

from outrider.errors import InvalidArgument, ModelUnsupported
from outrider.lm.heads.block import BlockConfig, BlockHead
from outrider.lm.heads.checkpoint import load_eagle3_or_block
from outrider.lm.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.training.options import DistillOptions, MethodKind
from outrider.training.teacher import Teacher
from outrider.training.teacher_batches import TeacherBatch

_HEAD_NAMES: Final = {"input_layernorm.weight": "hidden_norm.weight"}
"""Names of a decoder layer's weights in an EAGLE-3 head, where they differ."""
_RANK: Final = 192
"""Of the transition of a block head. DSpark has 256, for vocabularies of 150,000 tokens."""
_CROSS_ENTROPY: Final = 0.1
"""Its share in the loss of a block head."""


class Method(ABC):
    """A draft in training.

    Attributes:
        module: module to train; its frozen parameters are the target's.
        depth: number of consecutive tokens that are predicted.
        trained_depth: number of depths in the loss.
        shallow_depth: number of depths that train all weights; steps with only these are cheaper.
        num_parts: a step's loss is of the predictions from one of so many parts of the columns, in turn.
        greedy_temperature: of the target's distribution that the loss wants at greedy answers, above 0.
    """

    module: nn.Module
    depth: int
    trained_depth: int
    shallow_depth: int = 1
    num_parts: int = 1
    greedy_temperature: float = 1.0

    @abstractmethod
    def states(self, batch: TeacherBatch, depth: int, columns: slice) -> Iterator[Tensor]:
        """Yield, for k = 0 .. depth - 1, the input of `head`: [B, N, H]; column t predicts token t + k + 2.

        Args:
            batch: texts of T tokens.
            depth: number of depths.
            columns: which N of the T columns: all of them, but for a method that has several parts.
        """

    @property
    @abstractmethod
    def head(self) -> nn.Linear:
        """The output layer over the draft vocabulary."""

    def logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return the logits of the draft's tokens: [n, draft_size].

        Args:
            states: inputs of `head`: [n, H].
            previous: the text's token before each that is predicted: int64 [n].
        """
        return functional.linear(states, self.head.weight)

    def loss(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """Return the loss of predictions: a mean over tokens; here their cross entropy.

        Args:
            logits: of the draft: [n, draft_size].
            wanted: the target's probabilities of the draft's tokens: float32 [n, draft_size].
        """
        return functional.cross_entropy(logits.float(), wanted)


class Eagle3Method(Method):
    """An EAGLE-3 head, unrolled over its own outputs (Li et al. 2025)."""

    module: Eagle3Head

    def __init__(self, teacher: Teacher, vocabulary: DraftVocabulary, options: DistillOptions) -> None:
        self.depth = self.trained_depth = options.depth
        config = Eagle3Config(_layer_config(teacher), teacher.hidden_size, len(vocabulary))
        self.module = Eagle3Head(config).to(teacher.device)
        _take_over(self.module.lm_head, teacher.output_layer, vocabulary)
        _initialise_as_last_layer(self.module, teacher)
        self._embedding = teacher.embedding

    @property
    def head(self) -> nn.Linear:
        """The output layer."""
        return self.module.lm_head

    def states(self, batch: TeacherBatch, depth: int, columns: slice) -> Iterator[Tensor]:
        """See `Method`."""
        embeddings = (
            functional.embedding(_shifted(batch.token_ids, step + 1), self._embedding).to(self.module.fc.weight.dtype)
            for step in range(depth)
        )
        return self.module.unroll(batch.features.to(self.module.fc.weight.dtype), embeddings)


class BlockMethod(Method):
    """A head that drafts a block in one pass; see `outrider.lm.heads.block`.

    It may begin as a trained head: an EAGLE-3 head, or a block head that is trained on.

    Its loss is 0.1 of the cross entropy and 0.9 of the total variation between the draft's and the target's
    distributions: a sampled token is accepted with a probability of 1 minus that (DSpark, section 3.3). Of a greedy
    answer only the target's most likely tokens are of use, so there its distribution is that of a lower temperature.
    """

    module: BlockHead
    # Neighbours teach much the same, and a block at one column is five rows and as many vocabularies.
    num_parts = 3
    greedy_temperature = 0.5

    def __init__(self, teacher: Teacher, vocabulary: DraftVocabulary, options: DistillOptions) -> None:
        self.depth = self.trained_depth = self.shallow_depth = options.depth
        eagle3 = Eagle3Config(_layer_config(teacher), teacher.hidden_size, len(vocabulary))
        self.module = BlockHead(BlockConfig(eagle3, options.depth, min(_RANK, len(vocabulary)))).to(teacher.device)
        _take_over(self.module.lm_head, teacher.output_layer, vocabulary)
        _initialise_as_last_layer(self.module, teacher)
        self._embedding = teacher.embedding
        with torch.no_grad():
            self.module.mask_embeddings.normal_(std=float(teacher.embedding.float().std()))
        if options.start is not None:
            _start_from(self.module, load_eagle3_or_block(options.start, teacher.output_layer.__getitem__)[0])

    @property
    def head(self) -> nn.Linear:
        """The output layer."""
        return self.module.lm_head

    def states(self, batch: TeacherBatch, depth: int, columns: slice) -> Iterator[Tensor]:
        """See `Method`."""
        dtype = self.module.fc.weight.dtype
        anchors = functional.embedding(_shifted(batch.token_ids, 1), self._embedding).to(dtype)
        return islice(self.module.unroll(batch.features.to(dtype), [anchors], columns), depth)

    def logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """See `Method`."""
        return self.module.logits(states, functional.embedding(previous, self._embedding).to(states.dtype))

    def loss(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """See the class."""
        overlap = torch.minimum(logits.float().softmax(-1), wanted).sum(-1).mean()
        return _CROSS_ENTROPY * super().loss(logits, wanted) - (1 - _CROSS_ENTROPY) * overlap


class MedusaMethod(Method):
    """Medusa heads, each on the target's last hidden state (Cai et al. 2024)."""

    module: MedusaHeads

    def __init__(self, teacher: Teacher, vocabulary: DraftVocabulary, options: DistillOptions) -> None:
        self.depth = self.trained_depth = self.shallow_depth = options.depth
        self.module = MedusaHeads(teacher.hidden_size, options.depth, len(vocabulary)).to(teacher.device)
        _take_over(self.module.lm_head, teacher.output_layer, vocabulary)

    @property
    def head(self) -> nn.Linear:
        """The output layer that all heads share."""
        return self.module.lm_head

    def states(self, batch: TeacherBatch, depth: int, columns: slice) -> Iterator[Tensor]:
        """See `Method`."""
        hidden = batch.hidden.to(self.module.lm_head.weight.dtype)
        for number, state in enumerate(self.module.unroll(hidden)):
            if number < depth:
                yield state


class LayersMethod(Method):
    """A shallow model: some of the target's layers between its embedding and its output layer.

    Its predictions depend on the text alone, so that every depth is the same prediction at another column.
    """

    trained_depth = 1

    def __init__(self, teacher: Teacher, vocabulary: DraftVocabulary, options: DistillOptions) -> None:
        self.depth = options.depth
        self.model = _shallow(teacher, options.num_layers)
        self.module = self.model.base_model
        self._head = nn.Linear(teacher.hidden_size, len(vocabulary), bias=False, device=teacher.device)
        _take_over(self._head, teacher.output_layer, vocabulary)
        self.model.get_input_embeddings().requires_grad_(False)

    @property
    def head(self) -> nn.Linear:
        """The rows of the target's output layer for the draft vocabulary."""
        return self._head

    def states(self, batch: TeacherBatch, depth: int, columns: slice) -> Iterator[Tensor]:
        """See `Method`."""
        states = self.module(batch.token_ids, use_cache=False).last_hidden_state
        for number in range(depth):
            yield functional.pad(states[:, number + 1 :], (0, 0, 0, min(number + 1, states.shape[1])))


def make_method(teacher: Teacher, vocabulary: DraftVocabulary, options: DistillOptions) -> Method:
    """Return a new draft with weights initialised from the target and the seed of the options."""
    torch.manual_seed(options.seed)
    kinds: dict[MethodKind, Callable[[Teacher, DraftVocabulary, DistillOptions], Method]] = {
        MethodKind.EAGLE3: Eagle3Method,
        MethodKind.BLOCK: BlockMethod,
        MethodKind.MEDUSA: MedusaMethod,
        MethodKind.LAYERS: LayersMethod,
    }
    return kinds[options.method](teacher, vocabulary, options)


def chosen_layers(num_layers: int, num_wanted: int) -> list[int]:
    """Return the target layers that a shallow draft is initialised with: evenly spaced from the first to the last."""
    if num_wanted == 1:
        return [0]
    return [round(index * (num_layers - 1) / (num_wanted - 1)) for index in range(num_wanted)]


def _layer_config(teacher: Teacher) -> LlamaConfig:
    text = teacher.model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rope: Any = getattr(text, "rope_parameters", None)
    fields: dict[str, Any] = {"rope_parameters": dict(rope)} if rope else {}
    return LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        max_position_embeddings=text.max_position_embeddings,
        **fields,
    )


def _initialise_as_last_layer(head: Eagle3Head, teacher: Teacher) -> None:
    """Initialise the head as the target's last layer over the last of the three features, if the shapes agree.

    Measured on a target of 135 million weights, after 0.2 million tokens: 29 % of the first predictions are accepted,
    against 25 % with random weights.
    """
    hidden_size, own = teacher.hidden_size, head.state_dict()
    last = {name: item for layer in teacher.last_layers(1) for name, item in layer.items()}
    found = {f"midlayer.{_HEAD_NAMES.get(name, name)}": item for name, item in last.items()}
    found["norm.weight"] = teacher.final_norm
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -hidden_size:] = torch.eye(hidden_size, device=teacher.device)
        for name, item in found.items():
            into = own.get(name)
            if into is not None and into.ndim == 2 and into.shape[1] == 2 * item.shape[1]:
                # The half for the feature; the target's layer has no embedding input.
                into = into[:, item.shape[1] :]
            if into is not None and into.shape == item.shape:
                into.copy_(item)


def _start_from(head: BlockHead, trained: Eagle3Head) -> None:
    """Take over the weights of a trained EAGLE-3 or block head; raise `InvalidArgument` where they do not fit."""
    if isinstance(trained, BlockHead) and trained.block.block_size != head.block.block_size:
        raise InvalidArgument(
            f"drafts {trained.block.block_size} tokens at a time, and the depth is {head.block.block_size}", "start"
        )
    try:
        head.load_state_dict(trained.state_dict(), strict=False)
    except RuntimeError as error:
        raise InvalidArgument(f"does not fit this target: {str(error).splitlines()[-1].strip()}", "start") from None


def _take_over(head: nn.Linear, output_layer: Tensor, vocabulary: DraftVocabulary) -> None:
    with torch.no_grad():
        head.weight.copy_(output_layer[vocabulary.token_ids.to(output_layer.device)])
    head.requires_grad_(False)


def _shallow(teacher: Teacher, num_layers: int) -> PreTrainedModel:
    """Return a model of the target's class with a few of its layers, in float32."""
    config = copy.deepcopy(teacher.model.config)
    text = config.get_text_config()
    if num_layers > text.num_hidden_layers:
        raise ModelUnsupported(f"num_layers is {num_layers}, the target has {text.num_hidden_layers} layers")
    picked = chosen_layers(text.num_hidden_layers, num_layers)
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[index] for index in picked]
    model = type(teacher.model)(config)
    model.to(teacher.model.device.type)  # type: ignore[arg-type]
    model.load_state_dict(_renumbered(teacher.model.state_dict(), picked), strict=True)
    model.train()
    return model


def _renumbered(weights: dict[str, Tensor], picked: Sequence[int]) -> dict[str, Tensor]:
    """Return the weights of the picked layers under their new numbers, and the weights outside of layers."""
    renumbered = {}
    for name, weight in weights.items():
        parts = name.split(".")
        place = parts.index("layers") + 1 if "layers" in parts else None
        if place is None:
            renumbered[name] = weight.float()
            continue
        for number, index in enumerate(picked):
            if int(parts[place]) == index:
                renumbered[".".join([*parts[:place], str(number), *parts[place + 1 :]])] = weight.float()
    return renumbered


def _shifted(token_ids: Tensor, num: int) -> Tensor:
    """Return, at each column, the token id `num` positions later; 0 beyond the end of the text."""
    return functional.pad(token_ids[:, num:], (0, min(num, token_ids.shape[1])))
