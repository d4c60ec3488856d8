"""What benches call a model: any name that a target takes, or `shape:8b` for random weights of a known shape."""

from typing import Final

from bench.shapes import ensure_shape
from outrider.lm import embedded
from outrider.lm.planted import PlantedOptions

_SHAPE: Final = "shape:"


def served_name(name: str) -> str:
    """Returns the name under which a service loads the model; random weights are written first where needed.

    Raises:
        InvalidArgument: no shape has this name.
    """
    return str(ensure_shape(name.removeprefix(_SHAPE))) if name.startswith(_SHAPE) else name


def transformers_name(name: str) -> str:
    """Returns the name under which transformers loads the model."""
    return str(embedded.ensure_embedded()) if name == embedded.NAME else served_name(name)


def planted_pair(target: str, draft: str, acceptance: float, draft_layers: int = 0) -> tuple[str, str]:
    """Returns the names of a planted target and its draft; see `outrider.lm.planted`.

    Args:
        target: model whose passes the target runs.
        draft: model whose passes the draft runs; its vocabulary is as large.
        acceptance: probability that the target outputs the draft's first choice, in [0, 1].
        draft_layers: first layers of the draft that are run; 0 for all.
    """
    names = served_name(target), served_name(draft)
    options = PlantedOptions(base=names[0], role="target", acceptance=acceptance, seed=7)
    other = PlantedOptions(base=names[1], role="draft", acceptance=acceptance, seed=7, num_layers=draft_layers)
    return options.name, other.name
