"""What a distillation leaves for people: a curve as a picture, and a model card."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider import __version__
from outrider.training.acceptance import Acceptance


@dataclass(frozen=True)
class Results:
    """What a distillation came to.

    Attributes:
        method: layers, eagle3 or medusa.
        target: as it was given.
        data: where the conversations came from.
        num_train: conversations learned from.
        num_held_out: conversations measured on.
        num_steps: optimizer steps.
        num_tokens: tokens seen, repetitions included.
        trained_s: seconds of training.
        num_weights: that were trained.
        draft_vocab_size: tokens that the draft can say.
        acceptance: by name of a tree's shape, then for greedy answers (True) and sampled ones (False).
        cost_ratio: time of a draft's step over that of a pass of the target, both for one position, uncompiled.
        predicted_speedup: tokens a second over plain decoding, chains, greedy, if nothing overlaps.
        command: that made it.
    """

    method: str
    target: str
    data: str
    num_train: int
    num_held_out: int
    num_steps: int
    num_tokens: int
    trained_s: float
    num_weights: int
    draft_vocab_size: int
    acceptance: dict[str, dict[bool, Acceptance]]
    cost_ratio: float
    predicted_speedup: float
    command: str

    def as_json(self) -> dict[str, Any]:
        """Returns the figures as plain values."""
        return {
            "method": self.method,
            "target": self.target,
            "steps": self.num_steps,
            "tokens_seen": self.num_tokens,
            "trained_s": round(self.trained_s, 1),
            "weights": self.num_weights,
            "cost_ratio": round(self.cost_ratio, 4),
            "predicted_speedup": round(self.predicted_speedup, 3),
            "acceptance": {
                shape: {
                    "greedy" if kind else "sampled": {
                        "rates": [round(rate, 4) for rate in item.rates],
                        "mean_acceptance_length": round(item.mean_acceptance_length, 3),
                        "rounds": item.num_rounds,
                    }
                    for kind, item in kinds.items()
                }
                for shape, kinds in self.acceptance.items()
            },
        }


def write_card(folder: Path, results: Results) -> None:
    """Writes `README.md`, the model card, and `results.json`."""
    (folder / "results.json").write_text(json.dumps(results.as_json(), indent=2) + "\n")
    lines = [
        "---",
        "library_name: outrider",
        "tags: [speculative-decoding, draft]",
        "---",
        f"# A draft for {results.target}",
        "",
        f"Method `{results.method}`, {results.num_weights / 1e6:.2f} million trained weights, a vocabulary of "
        f"{results.draft_vocab_size} tokens. Made by Outrider {__version__}:",
        "",
        "```",
        results.command,
        "```",
        "",
        f"- Data: {results.data}; {results.num_train} conversations to learn from, {results.num_held_out} held out.",
        f"- Training: {results.num_steps} steps, {results.num_tokens / 1e6:.2f} million tokens seen, "
        f"{results.trained_s / 60:.1f} minutes on {_hardware()}, PyTorch {torch.__version__}.",
        f"- A step of the draft takes {results.cost_ratio:.3f} of a pass of the target (one position, uncompiled).",
        f"- Predicted speed over plain decoding (chains, greedy, nothing overlapping): "
        f"{results.predicted_speedup:.2f}x.",
        "",
        "Acceptance on held-out prompts, of rounds that reached the position:",
        "",
        *_table(results.acceptance),
        "",
        "![training curve](curve.png)",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def draw_curve(path: Path, points: Sequence[dict[str, Any]]) -> None:
    """Writes loss and held-out acceptance over steps to a PNG file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.0, 4.0), layout="constrained")
    losses = [(point["step"], point["loss"]) for point in points if "loss" in point]
    left.plot([step for step, _ in losses], [loss for _, loss in losses], linewidth=0.7)
    left.set(xlabel="step", ylabel="cross entropy under the target", title="loss")
    measured = [point for point in points if "greedy" in point]
    for kind, style in (("greedy", "-"), ("sampled", "--")):
        for position in range(len(measured[0][kind]) if measured else 0):
            values = [point[kind][position] for point in measured]
            steps = [point["step"] for point in measured]
            right.plot(steps, values, style, marker=".", color=f"C{position}", label=f"{kind}, position {position + 1}")
    right.set(xlabel="step", ylabel="acceptance rate", title="held-out acceptance", ylim=(0, 1))
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _table(acceptance: dict[str, dict[bool, Acceptance]]) -> list[str]:
    depth = max(len(item.rates) for kinds in acceptance.values() for item in kinds.values())
    head = "| proposal | answers | " + " | ".join(f"position {k + 1}" for k in range(depth))
    lines = [head + " | mean acceptance length |", "|---" * (depth + 3) + "|"]
    for shape, kinds in acceptance.items():
        for kind, item in ((kind, item) for kind, item in kinds.items() if item.num_rounds):
            cells = [f"{rate:.1%}" for rate in item.rates] + ["-"] * (depth - len(item.rates))
            name = "greedy" if kind else "temperature 1"
            lines.append(f"| {shape} | {name} | {' | '.join(cells)} | {item.mean_acceptance_length:.2f} |")
    return lines


def _hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} threads of a {platform.machine()} CPU"
