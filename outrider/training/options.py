"""What a distillation is asked for."""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from outrider.errors import InvalidArgument

_UNITS: Final = {"s": 1, "m": 60, "h": 3600}


class MethodKind(StrEnum):
    """The kinds of drafts that can be made."""

    LAYERS = "layers"
    EAGLE3 = "eagle3"
    MEDUSA = "medusa"


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """How a draft is made.

    Attributes:
        target: a folder, a hub id, or `embedded`.
        output: folder of the draft; work in progress is kept in `output/work`.
        method: what kind of draft.
        budget_s: seconds that the training may take, all told; the schedule is planned to fit.
        num_steps: optimizer steps, in place of what the budget allows; 0 lets the budget decide.
        depth: tokens that the draft is trained to guess one after another.
        draft_vocab_size: tokens that it can say.
        num_layers: layers of a `layers` draft.
        tokens_per_batch: of one pass, padding included.
        accumulate: passes whose gradients make one step.
        learning_rate: of AdamW, at its highest.
        max_len: conversations are cut there, in tokens.
        held_out: share of the conversations that is only measured on.
        seed: of the order of the data and the initial weights.
        device: `auto`, `cpu`, `cuda`, ...
        max_store_bytes: disk for what the target computed; computed anew in every epoch where it takes more.
        checkpoint_every_s: seconds between checkpoints; what comes after the last is repeated by an interrupted run.
        trim: leave out a head's output layer, which is the target's own: whoever loads the head takes it from there.
    """

    target: str
    output: Path
    method: MethodKind = MethodKind.EAGLE3
    budget_s: float = 1800.0
    num_steps: int = 0
    depth: int = 4
    draft_vocab_size: int = 8192
    num_layers: int = 2
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
        _check(
            "trim", not self.trim or self.method is not MethodKind.LAYERS, "off for `layers`, which is a whole model"
        )


def parse_duration(text: str) -> float:
    """Returns the seconds of `90s`, `30m`, `1.5h`, or of a number of seconds.

    Raises:
        InvalidArgument: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise InvalidArgument(f"{text!r} is no duration such as 90s, 30m or 1.5h", "budget")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _check(name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise InvalidArgument(f"{name} must be {wanted}", name)
