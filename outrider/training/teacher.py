"""The target as a teacher: what it computes at every position of a conversation, once, kept on disk."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
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
from outrider.training.schedule import groups

_PROBE_IDS: Final = (5, 3, 4, 6)
# What some families of models do to logits behind the output layer.
_LOGIT_CHANGES: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_CHUNK_ROWS: Final = 1024


@dataclass(frozen=True)
class Lesson:
    """What the teacher computed of some conversations, padded behind to one length T.

    Attributes:
        token_ids: int64 [B, T].
        lens: tokens of each: int64 [B].
        answer_start: int64 [B].
        greedy: bool [B].
        features: outputs of the feature layers, side by side: [B, T, 3 * H].
        hidden: what the output layer takes: [B, T, H].
        log_totals: logarithm of the sum of the exponentials of all logits: float32 [B, T].
    """

    token_ids: Tensor
    lens: Tensor
    answer_start: Tensor
    greedy: Tensor
    features: Tensor
    hidden: Tensor
    log_totals: Tensor

    @property
    def is_answer(self) -> Tensor:
        """Which tokens are of an answer: bool [B, T]."""
        columns = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return (columns >= self.answer_start[:, None]) & (columns < self.lens[:, None])


class Teacher:
    """A target in evaluation mode.

    Args:
        name: a folder, a hub id, or `embedded`.
        device: `auto`, `cpu`, `cuda`, ...

    Raises:
        ModelUnsupported: it cannot be loaded, or changes its logits behind the output layer.
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
        """Returns the tokenizer of a target; None where it has none."""
        return _tokenizer(_source(name))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def embedding(self) -> Tensor:
        """Input embeddings: [V, H]."""
        weight: Tensor = self.model.get_input_embeddings().weight  # type: ignore[assignment]
        return weight

    @property
    def output_layer(self) -> Tensor:
        """Weights of the output layer: [V, H]."""
        layer: torch.nn.Linear = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return layer.weight

    @property
    def last_layer(self) -> dict[str, Tensor]:
        """Weights of the last decoder layer by name; none where the model has no list of layers."""
        layers = find_layers(self.model, self.model.config.get_text_config().num_hidden_layers)
        return dict(layers[-1].state_dict()) if layers else {}

    @property
    def final_norm(self) -> Tensor:
        """Weights of the norm before the output layer: [H]; ones where it goes by another name."""
        norm = getattr(self.model.base_model, "norm", None)
        ones = torch.ones(self.hidden_size, device=self.device)
        return getattr(norm, "weight", ones)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end-of-text tokens."""
        generation = self.model.generation_config
        eos = generation.eos_token_id if generation is not None else None
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @torch.no_grad()
    def run(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns features [B, T, 3 * H], last hidden states [B, T, H] and log totals [B, T] of token ids [B, T]."""
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
                "the target changes its logits behind the output layer (a bound or a bias): "
                "a draft that shares the layer cannot learn them"
            )


class LessonStore:
    """Lessons by number of conversation, computed once.

    Args:
        teacher: computes them.
        corpus: the conversations.
        folder: for the file of what was computed; an interrupted start goes on where it was. None keeps nothing, and
            every lesson is computed when it is asked for.
    """

    def __init__(self, teacher: Teacher, corpus: Corpus, folder: Path | None) -> None:
        self._teacher = teacher
        self._corpus = corpus
        self._width = 4 * teacher.hidden_size
        self._states: np.memmap[Any, np.dtype[np.uint16]] | None = None
        self._totals: np.memmap[Any, np.dtype[np.float32]] | None = None
        self._folder = folder

    def fill(self, tokens_per_batch: int) -> Iterator[int]:
        """Computes what has not been; yields the number of tokens done, again and again until all are.

        Args:
            tokens_per_batch: of one pass, padding included.
        """
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        num = max(1, len(self._corpus.token_ids))
        self._states = _mapped(self._folder / "lessons.states", np.uint16, (num, self._width))
        self._totals = _mapped(self._folder / "lessons.totals", np.float32, (num,))
        lens = self._corpus.lens
        noted, done, num_tokens = self._num_done(), 0, 0
        for group in groups(np.argsort(lens, kind="stable"), lens, tokens_per_batch):
            done += len(group)
            num_tokens += int(lens[group].sum())
            if done > noted:
                self._compute(group)
                self._note_done(done)
            yield num_tokens

    def lesson(self, indices: Sequence[int]) -> Lesson:
        """Returns the lesson of these conversations."""
        corpus = self._corpus
        lens, token_ids = self._padded(indices)
        states = self._kept(indices, token_ids.shape[1]) or self._teacher.run(token_ids)
        device = self._teacher.device
        features, hidden, log_totals = (part.to(device) for part in states)
        return Lesson(
            token_ids.to(device),
            torch.from_numpy(lens).to(device),
            torch.from_numpy(corpus.answer_start[list(indices)].astype(np.int64)).to(device),
            torch.from_numpy(corpus.greedy[list(indices)]).to(device),
            features,
            hidden,
            log_totals,
        )

    def _padded(self, indices: Sequence[int]) -> tuple[NDArray[np.int64], Tensor]:
        """Returns the conversations' lengths, and their tokens: int64 [B, T]."""
        lens = self._corpus.lens[list(indices)]
        token_ids = torch.zeros(len(indices), int(lens.max()), dtype=torch.long)
        for row, index in enumerate(indices):
            token_ids[row, : lens[row]] = torch.from_numpy(self._corpus.tokens(index).astype(np.int64))
        return lens, token_ids

    def _compute(self, indices: Sequence[int]) -> None:
        assert self._states is not None and self._totals is not None
        lens, token_ids = self._padded(indices)
        features, hidden, totals = self._teacher.run(token_ids)
        states = torch.cat([features, hidden], dim=-1).to(torch.bfloat16).cpu().view(torch.uint16).numpy()
        for row, index in enumerate(indices):
            place = slice(self._corpus.offsets[index], self._corpus.offsets[index + 1])
            self._states[place] = states[row, : lens[row]]
            self._totals[place] = totals[row, : lens[row]].cpu().numpy()

    def _kept(self, indices: Sequence[int], length: int) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._states is None or self._totals is None:
            return None
        states = torch.zeros(len(indices), length, self._width, dtype=torch.bfloat16)
        totals = torch.zeros(len(indices), length)
        for row, index in enumerate(indices):
            place = slice(self._corpus.offsets[index], self._corpus.offsets[index + 1])
            part = torch.from_numpy(np.asarray(self._states[place])).view(torch.bfloat16)
            states[row, : len(part)] = part
            totals[row, : len(part)] = torch.from_numpy(np.asarray(self._totals[place]))
        width = self._teacher.hidden_size
        return states[..., : 3 * width], states[..., 3 * width :], totals

    @property
    def corpus(self) -> Corpus:
        """The conversations."""
        return self._corpus

    @property
    def identity(self) -> dict[str, object]:
        """What the lessons are of."""
        digest = hashlib.sha256(self._corpus.token_ids.astype("<i4").tobytes()).hexdigest()
        return {"target": self._teacher.fingerprint, "tokens": digest}

    @property
    def _progress(self) -> Path:
        assert self._folder is not None
        return self._folder / "lessons.json"

    def _num_done(self) -> int:
        if not self._progress.exists():
            return 0
        noted = json.loads(self._progress.read_text())
        return int(noted["done"]) if noted["identity"] == self.identity else 0

    def _note_done(self, num: int) -> None:
        scratch = self._progress.with_suffix(".partial")
        scratch.write_text(json.dumps({"identity": self.identity, "done": num}))
        scratch.rename(self._progress)


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> Any:
    wanted = int(np.prod(shape)) * np.dtype(dtype).itemsize
    mode = "r+" if path.exists() and path.stat().st_size == wanted else "w+"
    if mode == "w+":
        path.with_name("lessons.json").unlink(missing_ok=True)
    opened: Any = np.memmap
    return opened(path, dtype, mode, shape=shape)


def _source(name: str) -> str:
    return str(embedded.ensure_embedded()) if name == embedded.NAME else name


def _tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    if Path(source).is_dir() and not (Path(source) / "tokenizer_config.json").exists():
        return None
    return AutoTokenizer.from_pretrained(source)


def check_corpus(corpus: Corpus, teacher: Teacher) -> None:
    """Raises InvalidArgument where the corpus is not of this target."""
    if corpus.target_fingerprint and corpus.target_fingerprint != teacher.fingerprint:
        raise InvalidArgument(
            f"the data was made with target {corpus.target_fingerprint[:12]}, this one is {teacher.fingerprint[:12]}",
            "data",
        )
    if len(corpus.token_ids) and int(corpus.token_ids.max()) >= teacher.vocabulary_size:
        raise InvalidArgument("the data has token ids outside the target's vocabulary", "data")
