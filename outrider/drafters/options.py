"""Options of a model that a worker runs, and of a drafter, wherever it runs."""

from enum import Enum
from typing import Any, Self

from pydantic import BaseModel, Field, Json, model_validator

from outrider.drafter_names import main_of
from outrider.tokens import MAX_PROPOSAL_NODES


class DrafterKind(Enum):
    """The kinds of drafters; see `outrider.drafters`."""

    MODEL = "model"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    LAYERS = "layers"
    EAGLE3 = "eagle3"
    BLOCK = "block"
    MEDUSA = "medusa"
    MODEL_SUFFIX = "model+suffix"
    LAYERS_SUFFIX = "layers+suffix"
    EAGLE3_SUFFIX = "eagle3+suffix"
    BLOCK_SUFFIX = "block+suffix"
    MEDUSA_SUFFIX = "medusa+suffix"

    @property
    def main(self) -> "DrafterKind":
        """The kind with a model, where two are combined; else the kind itself."""
        return DrafterKind(main_of(self.value))


class SuffixScope(Enum):
    """Whose texts the `suffix` drafter drafts a session from: its own, or those of all sessions of its tenant.

    Clients without a tenant need not belong together: sessions of the tenant `default` share their texts with ALL only.
    """

    SESSION = "session"
    TENANT = "tenant"
    ALL = "all"


class ModelOptions(BaseModel, extra="forbid"):
    """Which model a worker runs, and how: the target's model or the draft's."""

    model: str = Field("embedded", description="Folder, hub id, `embedded` or `markov:...`: the model to run.")
    dtype: str = Field("auto", description="auto (the checkpoint's), bfloat16, float16 or float32.")
    device: str = Field("auto", description="auto (a GPU where there is one), cpu, cuda, cuda:1, ...")
    quantization: Json[dict[str, Any]] | None = Field(
        None, description='A transformers quantisation config as JSON, such as {"quant_method": "torchao", ...}.'
    )
    num_threads: int = Field(0, ge=0, le=1024, description="CPU threads of the model; 0 takes one per core.")
    compile: bool = Field(
        True, description="Compile the model's layers where there is a C++ compiler; the first start takes longer."
    )
    max_session_len: int = Field(
        32768, ge=2, le=1 << 24, description="Longest session in tokens; the model may allow less."
    )


class DrafterOptions(ModelOptions):
    """How to draft, with which model, within which limits; a draft's settings, and a target's for its own drafter."""

    drafter: DrafterKind = Field(
        DrafterKind.MODEL,
        description="How to draft; `layers` runs the target's model, `eagle3`, `block` and `medusa` a head "
        "(`embedded`: the one that comes with Outrider), `ngram` and `suffix` none. With `+suffix` the best of both.",
    )
    suffix_scope: SuffixScope = Field(
        SuffixScope.TENANT,
        description="Whose texts `suffix` drafts a session from: `session` (its own), `tenant` (those of its tenant, "
        "but its own where there are no tenants) or `all` (also where there are none).",
    )
    num_layers: int | None = Field(
        None, ge=1, le=1024, description="First layers of the model that draft; needed by the layers drafter."
    )
    target: str = Field(
        "",
        description="Folder or hub id of the target that a head was made for; empty takes the one that the head names.",
    )
    max_nodes: int = Field(
        0,
        ge=0,
        le=MAX_PROPOSAL_NODES,
        description="Nodes of a proposal, at most, unless a request sets it; 0: 7 for heads, else no bound, and a "
        "chain with lookahead 0.",
    )
    kv_budget_bytes: int = Field(1 << 30, ge=1 << 16, description="Bytes of KV cache, or of indexed texts, at most.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.drafter.main is DrafterKind.LAYERS) != (self.num_layers is not None):
            raise ValueError("num_layers is needed with the layers drafter, and has no meaning without it")
        return self
