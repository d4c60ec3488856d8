"""The target as a teacher: its features, last hidden states and distributions at every position of a text."""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from outrider.errors import InvalidArgument, ModelUnsupported
from outrider.lm import embedded
from outrider.lm.compilation import find_layers
from outrider.lm.fingerprint import weights_fingerprint
from outrider.lm.heads.eagle3 import usual_feature_layers
from outrider.lm.load_options import chosen_device
from outrider.lm.tokenizer import vocabulary_fingerprint
from outrider.training.corpus import Corpus

_PROBE_IDS: Final = (5, 3, 4, 6)
# Configuration fields of operations after the output layer that change logits.
_LOGIT_CHANGES: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_CHUNK_ROWS: Final = 1024


class Teacher:
    """A target in evaluation mode.

    Args:
        name: folder, hub id, or `embedded`.
        device: `auto`, `cpu`, `cuda`, ...

    Raises:
        ModelUnsupported: the target cannot be loaded, or changes its logits after the output layer.
    """

    def __init__(self, name: str, device: str = "auto") -> None:
        source = _source(name)
        try:
            place = {} if chosen_device(device) == "cpu" else {"device_map": chosen_device(device)}
            model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", **place)
            self.tokenizer = _tokenizer(source)
        except (OSError, ValueError, ImportError) as error:
            raise ModelUnsupported(f"cannot load {name}: {str(error).splitlines()[0]}") from error
        self.name = name
        self.model: PreTrainedModel = model
        self.fingerprint = weights_fingerprint(model)
        self.tokenizer_fingerprint = vocabulary_fingerprint(self.tokenizer.get_vocab()) if self.tokenizer else ""
        text = model.config.get_text_config()
        self.hidden_size: int = text.hidden_size
        self.vocabulary_size: int = text.vocab_size
        self.feature_layers = usual_feature_layers(text.num_hidden_layers)
        model.requires_grad_(False)
        self._check_output_layer()

    @staticmethod
    def tokenizer_of(name: str) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer of a target; None if it has none."""
        return _tokenizer(_source(name))

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    @property
    def embedding(self) -> Tensor:
        """Input embeddings [V, H]."""
        weight: Tensor = self.model.get_input_embeddings().weight  # type: ignore[assignment]
        return weight

    @property
    def output_layer(self) -> Tensor:
        """Weights of the output layer [V, H]."""
        layer: torch.nn.Linear = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return layer.weight

    def last_layers(self, num: int) -> list[dict[str, Tensor]]:
        """Return the weights of the last decoder layers by name; none if the model has no list of layers."""
        layers = find_layers(self.model, self.model.config.get_text_config().num_hidden_layers)
        return [dict(layer.state_dict()) for layer in layers[-num:]]

    @property
    def final_norm(self) -> Tensor:
        """Weights of the norm before the output layer [H]; ones if the model has no module `norm`."""
        norm = getattr(self.model.base_model, "norm", None)
        ones = torch.ones(self.hidden_size, device=self.device)
        return getattr(norm, "weight", ones)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-text token ids of the model."""
        generation = self.model.generation_config
        eos = generation.eos_token_id if generation is not None else None
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @torch.no_grad()
    def run(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return features [B, T, 3 * H], last hidden states [B, T, H] and log totals [B, T] of token ids [B, T]."""
        states = self.model.base_model(token_ids.to(self.device), use_cache=False, output_hidden_states=True)
        features = torch.cat([states.hidden_states[layer] for layer in self.feature_layers], dim=-1)
        hidden = states.last_hidden_state
        return features, hidden, self._log_totals(hidden)

    def _log_totals(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        totals = [(part @ self.output_layer.T).float().logsumexp(-1) for part in torch.split(rows, _CHUNK_ROWS)]
        return torch.cat(totals).view(hidden.shape[:2])

    @torch.no_grad()
    def _check_output_layer(self) -> None:
        token_ids = torch.tensor([_PROBE_IDS], device=self.device) % self.vocabulary_size
        states = self.model.base_model(token_ids, use_cache=False, output_hidden_states=True)
        logits = self.model(token_ids, use_cache=False).logits.float()
        own = (states.last_hidden_state @ self.output_layer.T).float()
        text = self.model.config.get_text_config()
        changes = [name for name in _LOGIT_CHANGES if getattr(text, name, None) not in (None, 1)]
        if changes or (own - logits).abs().max() > 0.05 * logits.abs().max():
            raise ModelUnsupported(
                "the target changes its logits after the output layer (a bound or a bias): "
                "a draft that shares the layer cannot be trained"
            )


def _source(name: str) -> str:
    return str(embedded.ensure_embedded()) if name == embedded.NAME else name


def _tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    if Path(source).is_dir() and not (Path(source) / "tokenizer_config.json").exists():
        return None
    return AutoTokenizer.from_pretrained(source)


def check_corpus(corpus: Corpus, teacher: Teacher) -> None:
    """Raise `InvalidArgument` if the corpus is of another target, or has token ids outside of its vocabulary."""
    if corpus.target_fingerprint and corpus.target_fingerprint != teacher.fingerprint:
        raise InvalidArgument(
            f"the data is of target {corpus.target_fingerprint[:12]}, this target is {teacher.fingerprint[:12]}",
            "data",
        )
    if len(corpus.token_ids) and int(corpus.token_ids.max()) >= teacher.vocabulary_size:
        raise InvalidArgument("the data has token ids outside the target's vocabulary", "data")
