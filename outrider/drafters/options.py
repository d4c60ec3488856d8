"""What a drafter can be told, wherever it runs."""

from enum import Enum
from typing import Any, Self

from pydantic import BaseModel, Field, Json, model_validator

from outrider.tokens import MAX_PROPOSAL_NODES


class DrafterKind(Enum):
    """How a draft guesses; see `outrider.drafters`."""

    MODEL = "model"
    NGRAM = "ngram"
    LAYERS = "layers"
    EAGLE3 = "eagle3"
    MEDUSA = "medusa"


class DrafterOptions(BaseModel, extra="forbid"):
    """How to draft, with which model, within which limits; a draft's settings, and what a target is told of its own."""

    drafter: DrafterKind = Field(DrafterKind.MODEL, description="How to draft.")
    model: str = Field(
        "embedded",
        description="Folder, hub id, `embedded` or `markov:...`: the draft model; for layers, the target's; for eagle3 "
        "and medusa, the head's folder (`embedded`: the one that comes with Outrider).",
    )
    dtype: str = Field("auto", description="auto (the checkpoint's), bfloat16, float16 or float32.")
    device: str = Field("auto", description="auto (a GPU where there is one), cpu, cuda, cuda:1, ...")
    quantization: Json[dict[str, Any]] | None = Field(
        None, description='A transformers quantisation config as JSON, such as {"quant_method": "torchao", ...}.'
    )
    num_threads: int = Field(0, ge=0, le=1024, description="CPU threads of the model; 0 takes one per core.")
    compile: bool = Field(
        True, description="Compile the model's layers where there is a C++ compiler; the first start takes longer."
    )
    num_layers: int | None = Field(
        None, ge=1, le=1024, description="First layers of the model that draft; needed by the layers drafter."
    )
    target: str = Field(
        "", description="Folder or hub id of the target that a head was made for; empty takes what the head says."
    )
    max_nodes: int = Field(
        0,
        ge=0,
        le=MAX_PROPOSAL_NODES,
        description="Nodes of a proposal, at most, unless a request says; 0: 7 for heads, else no bound, and a chain "
        "where drafts wait for verdicts.",
    )
    ngram_min: int = Field(2, ge=1, le=32, description="Tokens of the shortest n-gram that is looked up.")
    ngram_max: int = Field(5, ge=1, le=32, description="Tokens of the longest n-gram; it is tried first.")
    kv_budget_bytes: int = Field(1 << 30, ge=1 << 16, description="Bytes of KV cache (or n-gram indexes), at most.")
    prefill_chunk_len: int = Field(
        512, ge=4, le=65536, description="Rows of one pass, over all sessions, at most; each session has at least one."
    )
    draft_top_k: int = Field(
        64, ge=1, le=4096, description="Under `rejection`, most likely tokens that the draft samples from and sends."
    )
    draft_p_min: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Ends a branch before a token less likely than this; not under `rejection`, where that is lossy.",
    )
    max_session_len: int = Field(
        32768, ge=2, le=1 << 24, description="Longest session in tokens; the model may allow less."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min is {self.ngram_min}, above ngram_max {self.ngram_max}")
        if (self.drafter is DrafterKind.LAYERS) != (self.num_layers is not None):
            raise ValueError("num_layers is needed with the layers drafter, and has no meaning without it")
        return self
