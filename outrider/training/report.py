"""The report of a distillation: a training curve and a model card."""

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
    """The results of a distillation.

    Attributes:
        method: layers, eagle3, block or medusa.
        target: name of the target, as given.
        data: source of the conversations.
        num_train: number of conversations for training.
        num_held_out: number of held-out conversations.
        num_steps: number of optimizer steps.
        num_tokens: number of training tokens, repetitions included.
        trained_s: training time, in seconds.
        num_weights: number of trained weights.
        draft_vocab_size: size of the draft vocabulary.
        acceptance: acceptance by proposal shape, then for greedy answers (True) and sampled ones (False).
        cost_ratio: time of a draft step divided by that of a target pass, each over one position, uncompiled.
        predicted_speedup: speedup over plain decoding with chains, greedy, if drafting and verification alternate.
        command: command that made the draft.
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
        """Return the figures as JSON values."""
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
    """Write `README.md`, the model card, and `results.json`."""
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
        f"- Data: {results.data}; {results.num_train} conversations for training, {results.num_held_out} held out.",
        f"- Training: {results.num_steps} steps, {results.num_tokens / 1e6:.2f} million tokens, "
        f"{results.trained_s / 60:.1f} minutes on {_hardware()}, PyTorch {torch.__version__}.",
        f"- A draft step takes {results.cost_ratio:.3f} of the time of a target pass (one position, uncompiled).",
        f"- Predicted speedup over plain decoding (chains, greedy, drafting and verification alternate): "
        f"{results.predicted_speedup:.2f}x.",
        "",
        "Acceptance rate on held-out prompts, of the rounds that reached the position:",
        "",
        *_table(results.acceptance),
        "",
        "![training curve](curve.png)",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def draw_curve(path: Path, points: Sequence[dict[str, Any]]) -> None:
    """Write a plot of loss and held-out acceptance over steps to a PNG file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.0, 4.0), layout="constrained")
    losses = [(point["step"], point["loss"]) for point in points if "loss" in point]
    left.plot([step for step, _ in losses], [loss for _, loss in losses], linewidth=0.7)
    left.set(xlabel="step", ylabel="loss of a step", title="loss")
    measured = [point for point in points if "greedy" in point]
    for kind, style in (("greedy", "-"), ("sampled", "--")):
        for position in range(len(measured[0][kind]) if measured else 0):
            values = [point[kind][position] for point in measured]
            steps = [point["step"] for point in measured]
            right.plot(steps, values, style, marker=".", color=f"C{position}", label=f"{kind}, position {position + 1}")
    right.set(xlabel="step", ylabel="acceptance rate", title="held-out acceptance", ylim=(0, 1))
    # Beside the plots: inside, ten names hide the lines.
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
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
