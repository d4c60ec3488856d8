"""The sampling parameters that a checkpoint's generation_config.json recommends."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers.utils.hub import cached_file

from outrider.errors import InvalidArgument
from outrider.parameters import SamplingParameters

_LOG: Final = logging.getLogger(__name__)
_FILE: Final = "generation_config.json"
_NAMES: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The fields that vLLM takes over, and their names here."""


def default_parameters(source: str) -> dict[str, float]:
    """Return the sampling parameters that a checkpoint recommends, by their names in `SamplingParameters`.

    As in vLLM, `do_sample` is not among them. A file that cannot be read, or whose values are out of range, recommends
    nothing; a log record says so.

    Args:
        source: folder or hub id of the checkpoint.
    """
    path = cached_file(source, _FILE, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return {}
    try:
        found: Any = json.loads(Path(path).read_text())
        values = _chosen(found if isinstance(found, Mapping) else {})
        SamplingParameters(**values)  # type: ignore[arg-type]
    except (OSError, ValueError, TypeError, InvalidArgument) as error:
        _LOG.warning("%s of %s recommends nothing: %s", _FILE, source, error)
        return {}
    return values


def _chosen(found: Mapping[str, Any]) -> dict[str, float]:
    return {ours: found[theirs] for theirs, ours in _NAMES.items() if found.get(theirs) is not None}
