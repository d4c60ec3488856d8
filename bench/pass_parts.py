"""Where the time of a decoding pass goes: products, attention, the rest, and sampling. Of the model alone, in-process.

Passes are timed as they run; operators then by PyTorch's profiler, in further passes, since it slows the rest down.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from bench.result import median
from bench.traffic import Prompts
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.lm.model import KVCache, LanguageModel, SessionStep
from outrider.parameters import SamplingParameters
from outrider.speculation.draws import Draw, target_draws
from outrider.speculation.sampling import SamplingMetadata, TokenHistory
from outrider.tokens import TokenSpan

_NUM_TIMED: Final = 40
_NUM_PROFILED: Final = 10
_OPERATORS: Final = {
    "products": ("outrider::packed_product", "outrider::packed_linear"),
    "attention": ("outrider::paged_attention",),
}


def measure_pass_parts(name: str, session_counts: Sequence[int], context_len: int) -> dict[str, float]:
    """Return the milliseconds of each part of a pass over one token of each session.

    Args:
        name: model name.
        session_counts: numbers of sessions to measure.
        context_len: tokens that each session has before.
    """
    model = load_model(name, LoadOptions(compiles=True)).model
    figures: dict[str, float] = {}
    for num in session_counts:
        parts = _Sessions(model, num, context_len).measure()
        figures |= {f"decode_ms_{part}_{num}": 1e3 * seconds for part, seconds in parts.items()}
    return figures


class _Sessions:
    """Sessions of a model that all go on by one token in a pass."""

    def __init__(self, model: LanguageModel, num: int, context_len: int) -> None:
        self._model = model
        self._prompts = Prompts(model.info.vocabulary_size)
        self._len = context_len
        self._caches = [self._begun(model.new_cache(), context_len) for _ in range(num)]
        self._logits = self._run()

    def measure(self) -> dict[str, float]:
        """Return the seconds of each part."""
        whole = _timed(self._run)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(_NUM_PROFILED):
                self._run()
        spent = {event.key: event.self_cpu_time_total * 1e-6 / _NUM_PROFILED for event in profiled.key_averages()}
        parts = {part: sum(spent.get(name, 0.0) for name in names) for part, names in _OPERATORS.items()}
        parts["rest"] = whole - sum(parts.values())
        for part, temperature in (("sampling_greedy", 0.0), ("sampling", 1.0)):
            draws = self._draws(temperature)
            parts[part] = _timed(lambda draws=draws: target_draws(self._logits, draws))  # type: ignore[misc]
        for cache in self._caches:
            cache.release()
        return parts

    def _begun(self, cache: KVCache, context_len: int) -> KVCache:
        span = TokenSpan(0, self._prompts.draw(context_len))
        self._model.forward([SessionStep(cache, span, wants_logits=False)])
        return cache

    def _run(self) -> torch.Tensor:
        token_ids = self._prompts.draw(len(self._caches))
        steps = [
            SessionStep(cache, TokenSpan(self._len, (token_id,)))
            for cache, token_id in zip(self._caches, token_ids, strict=True)
        ]
        self._len += 1
        return torch.cat(self._model.forward(steps))

    def _draws(self, temperature: float) -> list[Draw]:
        parameters = SamplingParameters(temperature=temperature)
        metadata = SamplingMetadata(parameters, TokenHistory((), (), parameters), ())
        return [Draw(row, metadata, (7, row), self._len) for row in range(len(self._caches))]


def _timed(run: Callable[[], object]) -> float:
    # Neither a pass nor sampling returns before a GPU has done it.
    seconds = []
    for _ in range(_NUM_TIMED):
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    return median(seconds)
