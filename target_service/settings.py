"""Settings of the target process."""

from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import Field, Json

from outrider.drafters.options import DrafterOptions
from outrider.serving.settings import ServingSettings


class BlockUse(Enum):
    """Whether blocks of the KV cache are written to Redis and restored from it."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class TargetSettings(ServingSettings):
    """The target service: hosts the large model, verifies proposals, decodes plainly where none has come."""

    model: str = Field("embedded", description="Folder, hub id, `embedded` or `markov:...`: the target model.")
    replica: str = Field("", description="Name of this replica; empty takes the host's name and the process id.")
    dtype: str = Field("auto", description="auto (the checkpoint's), bfloat16, float16 or float32.")
    device: str = Field("auto", description="auto (a GPU where there is one), cpu, cuda, cuda:1, ...")
    quantization: Json[dict[str, Any]] | None = Field(
        None, description='A transformers quantisation config as JSON, such as {"quant_method": "torchao", ...}.'
    )
    num_threads: int = Field(0, ge=0, le=1024, description="CPU threads of the model; 0 takes one per core.")
    kv_budget_bytes: int = Field(4 << 30, ge=1 << 12, description="Bytes of KV cache, at most.")
    max_sessions: int = Field(256, ge=1, le=65536, description="Sessions generating at once, at most.")
    max_cached_sessions: int = Field(
        4096, ge=1, le=1 << 20, description="Sessions resident, generating or not, at most."
    )
    idle_ttl_s: float = Field(900.0, gt=0, le=604800, description="Seconds that an idle session is remembered.")
    max_session_len: int = Field(
        32768, ge=2, le=1 << 24, description="Longest session in tokens; the model may allow less."
    )
    prefill_chunk_len: int = Field(512, ge=4, le=65536, description="Prompt tokens of a session in one pass, at most.")
    max_decode_slowdown: float = Field(
        1.3, gt=1, le=100, description="While sessions decode, a prompt may stretch a pass to so many times its length."
    )
    compile: bool = Field(
        True, description="Compile the model's layers where there is a C++ compiler; the first start takes longer."
    )
    max_pass_s: float = Field(
        600.0, gt=0, le=86400, description="Seconds that a pass may take before liveness checks call the engine hung."
    )
    invariant: bool = Field(
        True,
        description="Compute each position to the same bits in every pass. `false` makes long prompts faster, halves "
        "the KV cache and slows decoding; the text may then depend on load and failovers, and every result says so.",
    )
    kv_blocks_url: str = Field(
        "", description="Redis or Valkey for blocks of the KV cache, which any target restores; empty for none."
    )
    kv_blocks_secret_file: Path | None = Field(
        None,
        description="File with a secret that all targets share: blocks are sealed with it, and others refused. Without "
        "it, whoever may write to that Redis decides what targets restore.",
    )
    kv_blocks: BlockUse = Field(
        BlockUse.AUTO,
        description="Whether KV blocks are written and restored: auto (where that is measured to beat computing), "
        "always or never.",
    )
    kv_blocks_timeout_s: float = Field(
        0.5, gt=0, le=60, description="Bound on each answer about KV blocks, in seconds."
    )
    kv_block_ttl_s: float = Field(3600.0, ge=1, le=2592000, description="Seconds until an unused KV block is gone.")
    kv_block_queue_bytes: int = Field(
        256 << 20, ge=0, le=1 << 40, description="Bytes of KV blocks that wait to be written, at most."
    )
    max_pass_rows: int = Field(1024, ge=8, le=1 << 20, description="Rows of one pass, over all sessions, at most.")
    colocated_drafter: str = Field(
        "",
        pattern="^(|model|layers|ngram)$",
        description="Drafter within this process, between its passes: model, layers or ngram; empty for none.",
    )
    colocated_model: str = Field("embedded", description="Model of that drafter; for layers, the target's.")
    colocated_num_layers: int | None = Field(None, ge=1, le=1024, description="For layers, how many.")
    colocated_kv_budget_bytes: int = Field(1 << 30, ge=1 << 16, description="Bytes of its KV cache, at most.")
    adaptive_speculation: bool = Field(
        True, description="Stop waiting for proposals, per session, where waiting is measured not to pay."
    )

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
            "kv_budget_bytes": self.colocated_kv_budget_bytes,
        }
        return DrafterOptions.model_validate({**shared, **own})
