"""Loading the drafter that settings name; the only module that lists all kinds."""

from typing import Final

from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.drafter import Drafter
from outrider.drafters.ngram import LONGEST, SHORTEST, NgramDrafter
from outrider.drafters.options import DrafterKind, DrafterOptions
from outrider.drafters.suffix import SuffixDrafter

_TEXTS_SHARE: Final = 8
"""Where a model and `suffix` are combined, texts take one part in so many of the memory."""


def load_drafter(settings: DrafterOptions) -> Drafter:
    """Return the drafter that the settings name, loaded and ready.

    Raises:
        InvalidArgument: a value is invalid.
        ModelUnsupported: the model cannot be loaded, or cannot be served.
    """
    match settings.drafter:
        case DrafterKind.NGRAM:
            return NgramDrafter(SHORTEST, LONGEST, settings.kv_budget_bytes, settings.max_session_len)
        case DrafterKind.SUFFIX:
            return SuffixDrafter(settings.suffix_scope, settings.kv_budget_bytes, settings.max_session_len)
        case DrafterKind.MODEL | DrafterKind.LAYERS:
            # Imported here, so that prompt lookup needs no model library.
            from outrider.drafters.model import load_model_drafter

            return load_model_drafter(settings)
        case DrafterKind.EAGLE3 | DrafterKind.BLOCK | DrafterKind.MEDUSA:
            from outrider.drafters.heads import load_head_drafter

            return load_head_drafter(settings)
        case _:
            return _load_combined(settings)


def _load_combined(settings: DrafterOptions) -> Drafter:
    budget_bytes = settings.kv_budget_bytes
    texts_bytes = budget_bytes // _TEXTS_SHARE
    changes = {"drafter": settings.drafter.main, "kv_budget_bytes": budget_bytes - texts_bytes}
    main = load_drafter(settings.model_copy(update=changes))
    suffix = SuffixDrafter(settings.suffix_scope, texts_bytes, main.info.max_session_len, only_guesses=True)
    return CombinedDrafter(main, suffix, settings.max_nodes)
