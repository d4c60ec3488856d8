"""What a target states about its model and its engine, whichever it has; `GetInfo`, `GetLoad` and metrics read it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.lm.pages import KVUsage
from outrider.parameters import AcceptanceRule
from target_service.engine.counters import EngineLoad
from target_service.kv_blocks.counters import BlockCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """Identity and limits of a target's model, constant while its process lives; see `GetInfoResponse`.

    Attributes:
        model: name of the model, as configured.
        model_fingerprint: of the model; targets with another one do not continue its sessions.
        tokenizer_fingerprint: of the vocabulary; empty where there is no tokenizer.
        numerics: everything that determines the bits of a logit; ends with `varying` where the batch does too.
        vocabulary_size: token ids are below it.
        max_session_len: longest session, in tokens.
        kv_budget_bytes: memory of the KV cache, in bytes.
        eos_token_ids: end-of-text token ids.
        acceptance_rules: rules by which the engine verifies proposals.
        num_layers: layers whose features drafts may request; 0 if there are none.
        hidden_size: width of one feature; 0 if there are none.
        weights_fingerprint: of the weights, independent of the dtype they are served in; empty where it is not known.
        drafter: drafter within the process; empty where there is none.
        default_parameters: sampling parameters that the model recommends.
        tokenizer_files: files of the tokenizer by name; empty where there is none.
        grammar_library: name and version of what decides about constraints; empty where the engine takes none.
    """

    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    numerics: str
    vocabulary_size: int
    max_session_len: int
    kv_budget_bytes: int
    eos_token_ids: Sequence[int]
    acceptance_rules: Sequence[AcceptanceRule]
    num_layers: int = 0
    hidden_size: int = 0
    weights_fingerprint: str = ""
    drafter: str = ""
    default_parameters: Mapping[str, float] = field(default_factory=dict)
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    grammar_library: str = ""


@dataclass(frozen=True, slots=True)
class KVBlockUsage:
    """KV blocks in Redis.

    Attributes:
        counters: outcomes of blocks since the start.
        restore_bytes_per_s: measured rate of restoring; 0 while unknown.
        block_len: positions of a block.
    """

    counters: BlockCounters
    restore_bytes_per_s: float
    block_len: int


class EngineUsage(Protocol):
    """Readings of an engine, from any thread.

    Attributes:
        load: counters.
    """

    load: EngineLoad

    @property
    def num_requests(self) -> int:
        """Requests that are open now."""

    @property
    def kv_usage(self) -> KVUsage:
        """Occupancy of the KV cache."""

    @property
    def block_usage(self) -> KVBlockUsage | None:
        """KV blocks in Redis; None where the engine keeps none."""

    def watch(self, on_pass: Callable[[float], object]) -> None:
        """Have `on_pass` called, in the engine's thread, with the seconds of each pass. Before the engine starts."""
