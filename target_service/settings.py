"""Settings of the target process."""

import re
from enum import Enum
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, Json, model_validator

from outrider.drafter_names import DRAFTERS, HEADS, main_of
from outrider.drafters.options import DrafterOptions, ModelOptions
from outrider.serving.settings import WorkerSettings

# Of the target's budget, and in addition to it: a model that drafts has a fraction of the target's layers.
_DRAFT_KV_SHARE: Final = 4
_LEAST_DRAFT_KV_BYTES: Final = 1 << 16


class EngineKind(Enum):
    """The engines of a target."""

    OWN = "own"
    VLLM = "vllm"


class BlockUse(Enum):
    """Whether blocks of the KV cache are written to Redis and restored from it."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class TargetSettings(WorkerSettings, ModelOptions):
    """The target service: hosts the large model, verifies proposals, decodes plainly where none has come."""

    engine: EngineKind = Field(
        EngineKind.OWN,
        description="Engine that runs the model: own, or vllm, which must be installed; docs/engines.md compares them.",
    )
    engine_args: Json[dict[str, Any]] | None = Field(
        None, description='Arguments of vLLM\'s EngineArgs as JSON, such as {"tensor_parallel_size": 2}.'
    )
    kv_budget_bytes: int = Field(4 << 30, ge=1 << 12, description="Bytes of KV cache, at most.")
    max_decode_slowdown: float = Field(
        1.3, gt=1, le=100, description="While sessions decode, a prompt may stretch a pass to so many times its length."
    )
    invariant: bool = Field(
        True,
        description="Compute each position to the same bits in every pass. `false` takes the kernels of PyTorch; the "
        "text may then depend on load and failovers, and statistics report it.",
    )
    kv_blocks_url: str = Field(
        "",
        description="Redis or Valkey for blocks of the KV cache, which any target restores; empty for none. TLS as for "
        "the orchestrator's Redis.",
    )
    kv_blocks_secret_file: Path | None = Field(
        None,
        description="File with a secret that all targets share: blocks are sealed with it, and others refused. Without "
        "it, write access to that Redis is enough to forge them.",
    )
    kv_blocks: BlockUse = Field(
        BlockUse.AUTO,
        description="Whether KV blocks are written and restored: auto (where that is measured to beat computing), "
        "always or never.",
    )
    kv_blocks_timeout_s: float = Field(0.5, gt=0, le=60, description="Timeout of each KV block call, in seconds.")
    colocated_drafter: str = Field(
        "",
        pattern=f"^(|{'|'.join(map(re.escape, DRAFTERS))})$",
        description="Drafter within this process, between its passes: a head (eagle3, block, medusa), model or layers, "
        "each also with +suffix, ngram or suffix; empty for none.",
    )
    colocated_model: str = Field("embedded", description="Model of that drafter; for layers, the target's.")
    colocated_num_layers: int | None = Field(None, ge=1, le=1024, description="For layers, how many.")
    adaptive_speculation: bool = Field(
        True, description="Stop waiting for proposals, per session, where waiting is measured not to pay."
    )

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine is EngineKind.OWN and self.engine_args is not None:
            raise ValueError("engine_args needs engine vllm")
        if self.engine is EngineKind.VLLM:
            for name in ("kv_blocks_url", "colocated_drafter", "quantization"):
                if getattr(self, name):
                    raise ValueError(f"{name} has no meaning with engine vllm")
        return self

    @property
    def drafter_options(self) -> DrafterOptions | None:
        """How this process drafts; None where it does not."""
        if not self.colocated_drafter:
            return None
        shared = {
            name: getattr(self, name) for name in ("dtype", "device", "compile", "num_threads", "max_session_len")
        }
        own = {
            "drafter": self.colocated_drafter,
            "model": self.colocated_model,
            "num_layers": self.colocated_num_layers,
            # A head is made for one target, which is this one.
            "target": self.model if main_of(self.colocated_drafter) in HEADS else "",
            "kv_budget_bytes": max(_LEAST_DRAFT_KV_BYTES, self.kv_budget_bytes // _DRAFT_KV_SHARE),
        }
        return DrafterOptions.model_validate({**shared, **own})
