"""The training loop: steps, checkpoints, measurements, and a plan that fits into a time budget."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from outrider.errors import InvalidArgument
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.training.acceptance import Acceptance
from outrider.training.methods import Method
from outrider.training.objective import loss_of, measure, targets_of
from outrider.training.options import DistillOptions
from outrider.training.schedule import NUM_TIMED_STEPS, batches, groups, is_deep, rate, steps_within
from outrider.training.teacher_batches import TeacherBatchStore

_NUM_MEASUREMENTS: Final = 12
_MEASURE_SHARE: Final = 0.06
_CLIP: Final = 1.0
_BETAS: Final = (0.9, 0.95)
_DECAY: Final = 0.01


@dataclass(frozen=True)
class Progress:
    """The progress of a training.

    Attributes:
        step: number of steps done.
        num_steps: number of steps of the plan; 0 before the plan exists.
        loss: loss of the last step.
        acceptance: last measured greedy acceptance rate at the first position, in [0, 1]; None before the first.
        remaining_s: estimated remaining time, in seconds.
    """

    step: int
    num_steps: int
    loss: float
    acceptance: float | None
    remaining_s: float


class Trainer:
    """A trainer of a method's module on batches with the teacher's outputs.

    Each step is a function of its number, the plan and the options, so that a run that was killed and resumed from its
    last checkpoint has the same curve as an uninterrupted one.

    Args:
        method: draft to train.
        vocabulary: vocabulary of the draft.
        batches: conversations for training.
        held_out: conversations for measurement.
        options: see `DistillOptions`.
        folder: folder of `checkpoint.pt` and `curve.jsonl`.
    """

    def __init__(
        self,
        method: Method,
        vocabulary: DraftVocabulary,
        batches: TeacherBatchStore,
        held_out: TeacherBatchStore,
        options: DistillOptions,
        folder: Path,
    ) -> None:
        self._method = method
        self._vocabulary = vocabulary
        self._store = batches
        self._held_out = held_out
        self._options = options
        self._checkpoint = folder / "checkpoint.pt"
        self._curve = Curve(folder / "curve.jsonl")
        self._parameters = [item for item in method.module.parameters() if item.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, betas=_BETAS, weight_decay=_DECAY)
        self._spent_s = 0.0
        self._times_s: dict[bool, float] = {}
        self._step = 0
        self._num_steps = options.num_steps
        self._num_tokens = 0
        self._trained_s = 0.0
        self._acceptance: float | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps of the plan; 0 before the plan exists."""
        return self._num_steps

    @property
    def num_tokens(self) -> int:
        """Number of training tokens so far, repetitions included."""
        return self._num_tokens

    @property
    def trained_s(self) -> float:
        """Training time over all runs, in seconds."""
        return self._trained_s

    def run(self, spent_s: float = 0.0, report: Callable[[Progress], None] = lambda _: None) -> None:
        """Train until all steps of the plan are done.

        Args:
            spent_s: seconds of the budget that were used before.
            report: called after each step.
        """
        self._spent_s = spent_s
        if self._step == 0:
            self._note_measurement()
        saved_s = started_s = time.monotonic()
        before_s = self._trained_s
        source = self._batches()
        while not self._num_steps or self._step < self._num_steps:
            began_s = time.monotonic()
            loss = self._train(islice(source, self._options.accumulate))
            self._step += 1
            now_s = time.monotonic()
            self._trained_s = before_s + now_s - started_s
            # The last time of each kind, because the first steps warm up.
            self._times_s[is_deep(self._step - 1, self._num_steps)] = now_s - began_s
            self._plan()
            is_last = self._step == self._num_steps
            self._curve.append({"step": self._step, "loss": loss, "tokens": self._num_tokens})
            if self._num_steps and (is_last or self._step % max(1, self._num_steps // _NUM_MEASUREMENTS) == 0):
                self._note_measurement()
            if is_last or now_s - saved_s > self._options.checkpoint_every_s:
                self.save()
                saved_s = now_s
            report(Progress(self._step, self._num_steps, loss, self._acceptance, self._left_s()))

    def measure(self, widths: tuple[int, ...]) -> dict[bool, Acceptance]:
        """Return the acceptance on the held-out conversations, for greedy answers (True) and sampled ones (False)."""
        found: dict[bool, Acceptance] = {}
        self._method.module.eval()
        generator = torch.Generator(self._parameters[0].device).manual_seed(self._options.seed)
        lens = self._held_out.corpus.lens
        for indices in groups(lens.argsort(kind="stable"), lens, self._options.tokens_per_batch):
            with self._precision():
                part = measure(self._method, self._held_out.batch(indices), self._vocabulary, generator, widths)
            found = {kind: found[kind] + part[kind] if found else part[kind] for kind in part}
        self._method.module.train()
        return found

    def save(self) -> None:
        """Write a checkpoint, atomically."""
        state = {
            "identity": self._identity(),
            "step": self._step,
            "num_steps": self._num_steps,
            "num_tokens": self._num_tokens,
            "trained_s": self._trained_s,
            "acceptance": self._acceptance,
            "weights": _trained_weights(self._method.module),
            "optimizer": self._optimizer.state_dict(),
        }
        scratch = self._checkpoint.with_suffix(".partial")
        torch.save(state, scratch)
        scratch.rename(self._checkpoint)

    def resume(self) -> bool:
        """Load the last checkpoint, if there is one; return whether steps remain.

        Raises:
            InvalidArgument: the checkpoint is of another training.
        """
        if not self._checkpoint.exists():
            self._curve.truncate(-1)
            return True
        state = torch.load(self._checkpoint, weights_only=True)
        if state["identity"] != self._identity():
            raise InvalidArgument(
                f"{self._checkpoint} is of another training (other data, method or options); remove it to start again",
                "output",
            )
        self._step, self._num_tokens = state["step"], state["num_tokens"]
        self._trained_s, self._acceptance = state["trained_s"], state["acceptance"]
        self._num_steps = self._options.num_steps or state["num_steps"]
        self._method.module.load_state_dict(state["weights"], strict=False)
        self._optimizer.load_state_dict(state["optimizer"])
        self._curve.truncate(self._step)
        return not self._num_steps or self._step < self._num_steps

    def _identity(self) -> dict[str, Any]:
        """Return the values that must be equal for a checkpoint to be valid."""
        options = self._options
        names = ("depth", "draft_vocab_size", "tokens_per_batch", "accumulate", "learning_rate", "max_len", "seed")
        shape = [list(item.shape) for item in self._parameters]
        return {
            "method": options.method.value,
            "start": str(options.start or ""),
            "teacher_outputs": self._store.identity,
            "shapes": shape,
            **{name: getattr(options, name) for name in names},
        }

    def _batches(self) -> Iterator[list[int]]:
        source = batches(self._store.corpus, self._options.tokens_per_batch, self._options.seed)
        return islice(source, self._step * self._options.accumulate, None)

    def _train(self, source: Iterator[list[int]]) -> float:
        # Before the plan exists its length is unknown; with so many steps these are in the warmup.
        num_steps = self._num_steps or 10**6
        for group in self._optimizer.param_groups:
            group["lr"] = rate(self._step, num_steps, self._options.learning_rate)
        total = 0.0
        method = self._method
        depth = method.trained_depth if is_deep(self._step, self._num_steps) else method.shallow_depth
        for indices in source:
            batch = self._store.batch(indices)
            with self._precision():
                targets = targets_of(batch, self._method, self._vocabulary)
                loss = loss_of(self._method, batch, targets, depth, self._step) / self._options.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            self._num_tokens += int(batch.lens.sum())
        nn.utils.clip_grad_norm_(self._parameters, _CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _plan(self) -> None:
        """Set the number of steps, once steps of both kinds have been timed."""
        if not self._num_steps and self._step >= NUM_TIMED_STEPS:
            budget_s = self._options.budget_s * (1 - _MEASURE_SHARE)
            left_s = budget_s - self._spent_s - self._trained_s
            self._num_steps = self._step + steps_within(left_s, self._step_s(deep=True), self._step_s(deep=False))
            self.save()

    def _step_s(self, *, deep: bool) -> float:
        """Return the seconds of a step of a kind; estimated from the other kind if none was timed in this run."""
        other_s = self._times_s[not deep] if deep not in self._times_s else 0.0
        return self._times_s.get(deep, other_s * self._method.trained_depth if deep else other_s)

    def _left_s(self) -> float:
        """Return the estimated seconds of the remaining steps; 0 before the plan exists."""
        kinds = [is_deep(step, self._num_steps) for step in range(self._step, self._num_steps)]
        return sum(kinds) * self._step_s(deep=True) + (len(kinds) - sum(kinds)) * self._step_s(deep=False)

    def _note_measurement(self) -> None:
        found = self.measure((1,) * self._method.depth)
        kind = bool(found[True].num_rounds)
        self._acceptance = found[kind].rates[0]
        self._curve.append(
            {
                "step": self._step,
                "greedy": list(found[True].rates),
                "sampled": list(found[False].rates),
                "greedy_length": found[True].mean_acceptance_length,
                "sampled_length": found[False].mean_acceptance_length,
            }
        )

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._parameters[0].device.type, torch.bfloat16)


class Curve:
    """A file of JSON lines with the losses and measurements of a training."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, point: dict[str, Any]) -> None:
        """Append a point."""
        with self._path.open("a") as file:
            file.write(json.dumps(point) + "\n")

    def points(self) -> list[dict[str, Any]]:
        """Return all points in order."""
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []

    def truncate(self, step: int) -> None:
        """Drop the points after a step."""
        kept = [json.dumps(point) + "\n" for point in self.points() if point["step"] <= step]
        self._path.write_text("".join(kept))


def _trained_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: item.detach() for name, item in module.named_parameters() if item.requires_grad}
