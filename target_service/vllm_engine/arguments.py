"""The arguments of vLLM's `EngineArgs`: what the target requires, beside what the operator chose."""

from collections.abc import Mapping
from typing import Any, Final

from outrider.errors import InvalidArgument
from target_service.settings import TargetSettings

_SPECULATION: Final = {
    "method": "custom_class",
    "model": "outrider.vllm.NoProposals",
    "num_speculative_tokens": 8,
}
"""Proposals come to the scheduler. vLLM reserves rows and memory for the longest of them."""
_REQUIRED: Final[Mapping[str, Any]] = {
    "scheduler_cls": "target_service.vllm_engine.scheduler.TargetScheduler",
    "async_scheduling": False,
    "disable_log_stats": False,
}


def engine_arguments(settings: TargetSettings) -> dict[str, Any]:
    """Return the arguments by name.

    Raises:
        InvalidArgument: the operator's are at odds with what the target requires.
    """
    given = dict(settings.engine_args or {})
    for name, value in _REQUIRED.items():
        if given.get(name, value) != value:
            raise InvalidArgument(f"{name} must be {value!r}", "engine_args")
    speculation = given.pop("speculative_config", {})
    if speculation is not None:
        if not isinstance(speculation, dict) or set(speculation) - {"num_speculative_tokens"}:
            problem = "speculative_config may have num_speculative_tokens only, or be null: drafts are services here"
            raise InvalidArgument(problem, "engine_args")
        speculation = {**_SPECULATION, **speculation}
    chosen = {"dtype": settings.dtype, "max_num_seqs": settings.max_sessions}
    return {"model": settings.model, **chosen, **given, **_REQUIRED, "speculative_config": speculation}
