"""What makes a row's output depend on the other rows of a pass, by a model's configuration."""

from collections.abc import Iterator
from typing import Any, Final

from transformers import PreTrainedModel

_SCALED_BY_LONGEST: Final = ("dynamic", "longrope")


def scales_by_longest(model: PreTrainedModel) -> bool:
    """Return whether the rotary embedding of all rows depends on the largest position among them."""
    return any("rope_type" in part and part["rope_type"] in _SCALED_BY_LONGEST for part in _parts(model))


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether a model is a mixture of experts, each of which is multiplied with the rows that chose it."""
    return any("expert" in str(key) and value for part in _parts(model) for key, value in part.items())


def _parts(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Yield a model's configuration and those within it."""
    waiting: list[Any] = [model.config.get_text_config().to_dict()]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting.extend(part.values())
            yield part
