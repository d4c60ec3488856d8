"""Synthetic conversations: the target generates users' turns, then answers them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from outrider.errors import InvalidArgument, ModelUnsupported
from outrider.lm.model import KVCache, LanguageModel, SessionStep
from outrider.parameters import SamplingParameters
from outrider.speculation.draws import Draw, target_draws
from outrider.speculation.randomness import KeyedSource
from outrider.speculation.sampling import SamplingMetadata, TokenHistory
from outrider.tokens import TokenSpan
from outrider.training.corpus import Corpus, from_conversations

_MARK: Final = "\u2063outrider\u2063"
_TURN: Final = SamplingParameters(temperature=1.0, top_p=0.95)
_GREEDY: Final = SamplingParameters(temperature=0.0)
_SAMPLED: Final = SamplingParameters(temperature=1.0)


@dataclass(frozen=True, slots=True)
class SynthesisOptions:
    """Options of the generation of conversations.

    Attributes:
        num_conversations: number of conversations.
        max_turn_len: maximum tokens of a user's turn.
        max_answer_len: maximum tokens of an answer.
        num_sessions: conversations generated concurrently.
        shard_size: conversations per file; a resumed run repeats at most one file.
        seed: seed of all random numbers.
    """

    num_conversations: int = 4000
    max_turn_len: int = 48
    max_answer_len: int = 192
    num_sessions: int = 32
    shard_size: int = 128
    seed: int = 0


@dataclass(slots=True)
class _Generation:
    """One text that is being generated."""

    token_ids: list[int]
    parameters: SamplingParameters
    max_new: int
    cache: KVCache
    start: int = 0
    done: bool = False
    source: KeyedSource = field(default_factory=lambda: KeyedSource(0))


class Synthesis:
    """A generator of a corpus, shard by shard; existing shards are kept.

    Args:
        model: the target.
        tokenizer: tokenizer of the target; if None, users' turns follow two random tokens, without a chat template.
        folder: folder of the shards.
        options: see `SynthesisOptions`.
        prompts: token ids of whole prompts, chat template included, instead of generated users' turns.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase | None,
        folder: Path,
        options: SynthesisOptions,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._folder = folder
        self._options = options
        self._prompts = prompts
        self._template = ChatTemplate(tokenizer) if tokenizer is not None and prompts is None else None

    @property
    def num_conversations(self) -> int:
        """Number of conversations of the complete corpus."""
        return len(self._prompts) if self._prompts is not None else self._options.num_conversations

    def run(self) -> Iterator[int]:
        """Generate the missing shards; yield the number of conversations done after each shard."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for first in range(0, self.num_conversations, self._options.shard_size):
            last = min(first + self._options.shard_size, self.num_conversations)
            path = self._folder / f"conversations-{first:07d}-{last:07d}.safetensors"
            if not path.exists():
                self._shard(range(first, last)).save(path)
            yield last

    def _shard(self, numbers: Sequence[int]) -> Corpus:
        prompts = self._given(numbers) if self._prompts is not None else self._generated(numbers)
        is_greedy = [number % 2 == 0 for number in numbers]
        answers = self._write(
            [(number, prompt) for number, prompt in zip(numbers, prompts, strict=True)],
            [_GREEDY if greedy else _SAMPLED for greedy in is_greedy],
            self._options.max_answer_len,
            purpose=1,
        )
        whole = [
            ([*prompt, *answer], len(prompt), greedy)
            for prompt, answer, greedy in zip(prompts, answers, is_greedy, strict=True)
        ]
        return from_conversations(whole, self._model.info.weights_fingerprint)

    def _given(self, numbers: Sequence[int]) -> list[list[int]]:
        assert self._prompts is not None
        return [list(self._prompts[number]) for number in numbers]

    def _generated(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return prompts with users' turns that the target generates."""
        starts = [(number, self._opening(number)) for number in numbers]
        turns = self._write(starts, [_TURN] * len(starts), self._options.max_turn_len, purpose=0)
        return [
            self._template.close(turn) if self._template else [*opening, *turn]
            for (_, opening), turn in zip(starts, turns, strict=True)
        ]

    def _opening(self, number: int) -> list[int]:
        if self._template:
            return self._template.opening
        random = np.random.default_rng([self._options.seed, number])
        return [int(token_id) for token_id in random.integers(3, self._model.info.vocabulary_size, 2)]

    def _write(
        self,
        starts: Sequence[tuple[int, Sequence[int]]],
        parameters: Sequence[SamplingParameters],
        max_new: int,
        purpose: int,
    ) -> list[list[int]]:
        """Return the tokens that the model generates after each start, an end-of-text token included."""
        waiting = [
            _Generation(
                list(start),
                each,
                min(max_new, self._model.info.max_session_len - len(start)),
                self._model.new_cache(),
                len(start),
                source=KeyedSource((self._options.seed << 34) + (number << 2) + purpose),
            )
            for (number, start), each in zip(starts, parameters, strict=True)
        ]
        texts = list(waiting)
        active: list[_Generation] = []
        while waiting or active:
            while waiting and len(active) < self._options.num_sessions:
                active.append(waiting.pop(0))
            self._pass(active)
            for text in active:
                if text.done:
                    text.cache.release()
            active = [text for text in active if not text.done]
        return [text.token_ids[text.start :] for text in texts]

    def _pass(self, active: Sequence[_Generation]) -> None:
        stops = frozenset(self._model.info.eos_token_ids)
        steps = [
            SessionStep(text.cache, TokenSpan(text.cache.cached_len, tuple(text.token_ids[text.cache.cached_len :])))
            for text in active
        ]
        logits = [rows[0] for rows in self._model.forward(steps)]
        draws = [
            Draw(
                row,
                SamplingMetadata(text.parameters, TokenHistory((), (), text.parameters), ()),
                text.source.key,
                len(text.token_ids),
            )
            for row, text in enumerate(active)
        ]
        for text, token_id in zip(active, target_draws(torch.stack(logits), draws), strict=True):
            if token_id is None:
                raise ModelUnsupported("the model's logits are not finite")
            text.cache.keep(())
            text.token_ids.append(token_id)
            text.done = token_id in stops or len(text.token_ids) - text.start >= text.max_new


class ChatTemplate:
    """The parts of a chat template before and after a user's turn.

    Raises:
        ModelUnsupported: the tokenizer has no chat template, or the template changes the content of turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise ModelUnsupported("the target has no chat template: provide prompts with --prompts")
        text = _render(tokenizer, [{"role": "user", "content": _MARK}])
        before, found, self._after = text.partition(_MARK)
        if not found:
            raise ModelUnsupported("the target's chat template changes users' turns: provide prompts with --prompts")
        self._before = before
        self.opening: list[int] = tokenizer.encode(before, add_special_tokens=False)

    def close(self, turn: Sequence[int]) -> list[int]:
        """Return the prompt with a user's turn, tokenised as a request with this turn would be."""
        content = str(self._tokenizer.decode(list(turn), skip_special_tokens=True)).strip()
        text = f"{self._before}{content}{self._after}"
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of prompts from a file of JSON lines.

    A line is {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]}; a last message of the assistant
    is dropped, because the target generates the answer.

    Raises:
        InvalidArgument: a line is invalid, which the message gives by its number, or there are no prompts.
    """
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = _prompt_text(json.loads(line), tokenizer)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(f"{path}, line {number}: {error}", "prompts") from error
        prompts.append(list(tokenizer.encode(text, add_special_tokens=False)))
    if not prompts:
        raise InvalidArgument(f"{path} has no prompts", "prompts")
    return prompts


def _prompt_text(item: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    if "messages" in item:
        messages = item["messages"]
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise ValueError("messages must have one that is not the assistant's")
        return _render(tokenizer, messages)
    if "prompt" not in item:
        raise ValueError("must have prompt or messages")
    return str(item["prompt"])


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
