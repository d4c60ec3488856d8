"""Names of drafters, as settings, requests and workers give them."""

from typing import Final

SUFFIX: Final = "suffix"
LOOKUPS: Final = ("ngram", SUFFIX)
"""Drafters without a model."""
HEADS: Final = ("eagle3", "block", "medusa")
"""Drafters over the target's features."""
_WITH_MODEL: Final = ("model", "layers", *HEADS)
DRAFTERS: Final = (*LOOKUPS, *_WITH_MODEL, *(f"{name}+{SUFFIX}" for name in _WITH_MODEL))
"""All of them; one with a model goes together with `suffix`."""


def main_of(drafter: str) -> str:
    """Return the drafter with a model where two are combined; else the drafter itself."""
    return drafter.partition("+")[0]


def includes(drafter: str, wanted: str) -> bool:
    """Return whether a drafter is the one that is wanted, or combines it with another; any is where none is named."""
    return wanted in ("", drafter, *drafter.split("+"))


def has_suffix(drafter: str) -> bool:
    """Return whether a drafter is `suffix`, or combined with it, and so uses the prediction of a request."""
    return drafter.rpartition("+")[2] == SUFFIX
