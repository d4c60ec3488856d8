"""Options of a distillation."""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from outrider.errors import InvalidArgument

_UNITS: Final = {"s": 1, "m": 60, "h": 3600}


class MethodKind(StrEnum):
    """The kinds of drafts."""

    LAYERS = "layers"
    EAGLE3 = "eagle3"
    BLOCK = "block"
    MEDUSA = "medusa"


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """Options of a distillation; an invalid one raises `InvalidArgument`.

    Attributes:
        target: folder, hub id, or `embedded`.
        output: folder of the draft; intermediate files are in `output/work`.
        method: kind of draft.
        budget_s: total seconds for data and training; the schedule is planned to fit, above 0.
        num_steps: optimizer steps; 0 for as many as fit into the budget.
        depth: consecutive tokens that the draft is trained to predict, in [1, 16].
        draft_vocab_size: size of the draft vocabulary, at least 1.
        num_layers: layers of a `layers` draft, at least 1.
        start: folder of an EAGLE-3 or block head that a `block` head begins as, with its vocabulary; None for the
            target's last layer.
        tokens_per_batch: tokens per pass, padding included, at least 1.
        accumulate: passes per optimizer step, at least 1.
        learning_rate: highest learning rate of AdamW, above 0.
        max_len: length that conversations are cut to, in tokens, at least 1.
        held_out: share of the conversations for measurement only, in (0, 1).
        seed: seed of the order of the data and of the initial weights.
        device: `auto`, `cpu`, `cuda`, ...
        max_store_bytes: maximum disk space of the teacher's outputs; if they need more, each epoch recomputes them.
        checkpoint_every_s: seconds between checkpoints, at least 0; a resumed run repeats the steps after the last.
        trim: whether to leave out a head's output layer, which the draft service then reads from the target's files.
    """

    target: str
    output: Path
    method: MethodKind = MethodKind.EAGLE3
    budget_s: float = 1800.0
    num_steps: int = 0
    depth: int = 4
    draft_vocab_size: int = 8192
    num_layers: int = 2
    start: Path | None = None
    tokens_per_batch: int = 2048
    accumulate: int = 1
    learning_rate: float = 2e-3
    max_len: int = 2048
    held_out: float = 0.03
    seed: int = 0
    device: str = "auto"
    max_store_bytes: int = 32 << 30
    checkpoint_every_s: float = 60.0
    trim: bool = False

    def __post_init__(self) -> None:
        for name in ("depth", "draft_vocab_size", "num_layers", "tokens_per_batch", "accumulate", "max_len"):
            _check(name, getattr(self, name) >= 1, "at least 1")
        _check("num_steps", self.num_steps >= 0, "at least 0")
        _check("budget_s", self.budget_s > 0, "above 0")
        _check("checkpoint_every_s", self.checkpoint_every_s >= 0, "at least 0")
        _check("learning_rate", self.learning_rate > 0, "above 0")
        _check("held_out", 0 < self.held_out < 1, "between 0 and 1")
        _check("depth", self.depth <= 16, "at most 16")
        _check("start", self.start is None or self.method is MethodKind.BLOCK, "left out but for method `block`")
        _check(
            "trim",
            not self.trim or self.method is not MethodKind.LAYERS,
            "off for method `layers`, which writes a whole model",
        )


def parse_duration(text: str) -> float:
    """Return the seconds of `90s`, `30m`, `1.5h`, or of a number of seconds.

    Raises:
        InvalidArgument: the text is not a duration above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise InvalidArgument(f"{text!r} is not a duration such as 90s, 30m or 1.5h", "budget")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _check(name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise InvalidArgument(f"{name} must be {wanted}", name)
