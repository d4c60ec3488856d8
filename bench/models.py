"""Model names of benchmarks: any name that a target loads, or `shape:8b` for random weights of a known shape."""

from typing import Final

from bench.shapes import ensure_shape
from outrider.lm import embedded
from outrider.lm.synthetic import SyntheticOptions

_SHAPE: Final = "shape:"


def served_name(name: str) -> str:
    """Return the name by which a service loads the model; write random weights first if needed.

    Raises:
        InvalidArgument: there is no shape with this name.
    """
    return str(ensure_shape(name.removeprefix(_SHAPE))) if name.startswith(_SHAPE) else name


def transformers_name(name: str) -> str:
    """Return the name by which transformers loads the model."""
    return str(embedded.ensure_embedded()) if name == embedded.NAME else served_name(name)


def synthetic_pair(target: str, draft: str, acceptance: float, draft_layers: int = 0) -> tuple[str, str]:
    """Return the names of a synthetic target and its draft; see `outrider.lm.synthetic`.

    Args:
        target: base model of the target.
        draft: base model of the draft, with a vocabulary of the same size.
        acceptance: probability that the target outputs the draft's first choice, in [0, 1].
        draft_layers: number of first layers of the draft to run; 0 for all.
    """
    names = served_name(target), served_name(draft)
    options = SyntheticOptions(base=names[0], role="target", acceptance=acceptance, seed=7)
    other = SyntheticOptions(base=names[1], role="draft", acceptance=acceptance, seed=7, num_layers=draft_layers)
    return options.name, other.name
