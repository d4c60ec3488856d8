"""Plots of results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")


def bars(path: Path, labels: Sequence[str], series: Mapping[str, Sequence[float]], title: str) -> None:
    """Write grouped bars to a PNG file: one group per label, one bar per series."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.9 * len(labels)), 4.0), layout="constrained")
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(labels))]
        axes.bar(places, values, width, label=name)
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    axes.set_title(title)
    # Outside of the axes, where it does not cover bars.
    figure.legend(loc="outside lower center", ncols=min(3, len(series)))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def lines(path: Path, series: Mapping[str, Sequence[tuple[float, float]]], label: str, title: str) -> None:
    """Write line plots to a PNG file, with a base-2 logarithmic x axis with this label."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
    for name, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(label)
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
