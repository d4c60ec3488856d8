"""What a stack on this machine consists of, and the settings that each of its processes gets."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from outrider.drafter_names import DRAFTERS, HEADS, LOOKUPS, main_of
from outrider.errors import InvalidArgument
from outrider.local.listening import check_address, chosen_addresses
from outrider.local.process import ProcessSpec
from outrider.parameters import AT_SERVICE, AT_TARGET, DRAFT_PLACES

EMBEDDED = "embedded"
"""Name of the model that needs no hub and no folder."""
MODEL_DRAFTERS: Final = ("model", *HEADS)
"""Drafters with a model or a head of their own."""
_PATH_STARTS: Final = ("/", "./", "../", "~")
_MANIFEST: Final = "outrider_draft.json"


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """One kind of draft.

    Attributes:
        drafter: one of `DRAFTERS`.
        model: for the drafter `model`, a model that shares the target's tokenizer; for `eagle3`, `block` and
            `medusa`, the head's folder, or `embedded`; for `layers`, the target's own model, which is taken where
            none is given.
        num_layers: for the drafter `layers`, how many.
        num_replicas: processes of this kind.
        num_threads: CPU threads of each.
        at: `service`, in processes of its own, or `target`, within each target's process; one kind at most is there.
        environment: further settings.
    """

    drafter: str = "ngram"
    model: str = ""
    num_layers: int = 4
    num_replicas: int = 1
    num_threads: int = 1
    at: str = AT_SERVICE
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.at not in DRAFT_PLACES:
            raise InvalidArgument(f"draft_at is {self.at!r}, must be one of {', '.join(DRAFT_PLACES)}", "draft_at")
        if self.drafter not in DRAFTERS:
            raise InvalidArgument(f"drafter is {self.drafter!r}, must be one of {', '.join(DRAFTERS)}", "drafter")
        if self.main == "model" and not self.model:
            raise InvalidArgument("drafter 'model' needs a model that shares the target's tokenizer", "draft_model")
        if self.main == "medusa" and not self.model:
            raise InvalidArgument("drafter 'medusa' needs the folder of its heads", "draft_model")
        _check_at_least("num_layers", self.num_layers, 1)
        _check_at_least("num_drafts", self.num_replicas, 1)
        check_folder(self.model, "draft_model")

    @property
    def main(self) -> str:
        """The drafter with a model, where two are combined; else the drafter itself."""
        return main_of(self.drafter)


def check_folder(model: str, field: str) -> None:
    """Check a model that is written as a path, such as ./llama; raise `InvalidArgument` where no such folder is."""
    if model.startswith(_PATH_STARTS) and not Path(model).is_dir():
        raise InvalidArgument(f"no such folder: {model}", field)


def _manifest(draft_model: str) -> Path:
    return Path(draft_model) / _MANIFEST


def fitting_drafter(model: str, draft_model: str, num_layers: int | None) -> str:
    """Return the default drafter for a target, a draft model if given, and a number of layers if given."""
    if draft_model:
        manifest = _manifest(draft_model)
        method = json.loads(manifest.read_text()).get("method") if manifest.is_file() else None
        return method if method in MODEL_DRAFTERS else "model"
    if num_layers is not None:
        return "layers"
    return "block+suffix" if model == EMBEDDED else "ngram"


@dataclass(frozen=True, slots=True)
class StackOptions:
    """A stack: targets, drafts, orchestrators and Redis.

    Attributes:
        model: the target's model: a folder, a hub id, or `embedded`.
        drafts: the kinds of drafts; empty for plain decoding only.
        dtype: of models that have one; empty takes the service's default.
        device: cpu, cuda, ...; empty takes the service's default.
        draft_device: the same for drafts; empty takes `device`.
        quantization: of the target, a transformers quantisation config as JSON; empty for the checkpoint's own.
        kv_budget_bytes: bound on the KV cache of each target; 0 takes the service's default.
        max_session_len: longest session in tokens, of targets and drafts; 0 takes the service's default.
        tensor_parallel: processes that run one target together, each with a part of every weight, on a GPU each.
        redis_url: Redis to keep sessions in; empty starts an embedded one.
        kv_blocks_url: Redis for blocks of the targets' KV cache; empty starts an embedded one where there are several
            targets and no `redis_url`.
        kv_blocks_bytes: bound on the memory of an embedded one; 0 for no blocks.
        num_targets: target processes.
        num_orchestrators: orchestrator processes.
        target_threads: CPU threads of each target; 0 for all cores.
        target_cores: cores that targets run on, by number; empty for all.
        target_environment: further settings of targets.
        orchestrator_environment: further settings of orchestrators.
        address: where orchestrators listen: HOST:PORT, HOST:0 for free ports, or HOST:PORT+ for the next free ports.
        http_address: the same for their HTTP API; empty for none.
        served_model_names: names of the model over HTTP; empty for the service's default.
        generation_config: `auto` or `none`, whether sampling parameters have the model's defaults; empty takes the
            service's default.
        exposes_metrics: whether each process exposes Prometheus metrics on a free port; see `ServiceProcess`.
        ready_timeout_s: bound on the start of each process; None waits as long as it makes progress, see `Startup`.
        drain_budget_s: bound on the end of each process.
    """

    model: str = EMBEDDED
    drafts: tuple[DraftOptions, ...] = field(default_factory=lambda: (DraftOptions(),))
    dtype: str = ""
    device: str = ""
    draft_device: str = ""
    quantization: str = ""
    kv_budget_bytes: int = 0
    max_session_len: int = 0
    tensor_parallel: int = 1
    redis_url: str = ""
    kv_blocks_url: str = ""
    kv_blocks_bytes: int = 1 << 30
    num_targets: int = 1
    num_orchestrators: int = 1
    target_threads: int = 0
    target_cores: frozenset[int] = frozenset()
    target_environment: Mapping[str, str] = field(default_factory=dict)
    orchestrator_environment: Mapping[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1:0"
    http_address: str = ""
    served_model_names: tuple[str, ...] = ()
    generation_config: str = ""
    exposes_metrics: bool = False
    ready_timeout_s: float | None = None
    drain_budget_s: float = 10.0

    def __post_init__(self) -> None:
        _check_at_least("num_targets", self.num_targets, 1)
        _check_at_least("num_orchestrators", self.num_orchestrators, 1)
        _check_at_least("target_threads", self.target_threads, 0)
        _check_at_least("kv_blocks_bytes", self.kv_blocks_bytes, 0)
        _check_at_least("kv_budget_bytes", self.kv_budget_bytes, 0)
        _check_at_least("max_session_len", self.max_session_len, 0)
        _check_at_least("tensor_parallel", self.tensor_parallel, 1)
        check_folder(self.model, "model")
        if sum(draft.at == AT_TARGET for draft in self.drafts) > 1:
            raise InvalidArgument("one kind of draft at most can run within the targets", "draft_at")
        check_address(self.address, "address", self.num_orchestrators)
        if self.http_address:
            check_address(self.http_address, "http_address", self.num_orchestrators)
            if self.http_address == self.address and not self.address.endswith((":0", "+")):
                raise InvalidArgument(f"http_address is {self.address}, which is the address too", "http_address")

    @property
    def has_own_block_store(self) -> bool:
        """Whether the stack starts a server for KV blocks: only with several targets is there one to restore them."""
        is_given = bool(self.redis_url or self.kv_blocks_url)
        return not is_given and self.num_targets > 1 and self.kv_blocks_bytes > 0

    def target_specs(self, kv_blocks_url: str = "") -> Iterator[ProcessSpec]:
        """Yield how to start each target; `kv_blocks_url` is that of the stack's own store of KV blocks."""
        settings = {
            "OUTRIDER_MODEL": self.model,
            "OUTRIDER_NUM_THREADS": str(self.target_threads),
            "OUTRIDER_KV_BLOCKS_URL": kv_blocks_url or self.kv_blocks_url,
            **_given(
                {
                    "OUTRIDER_QUANTIZATION": self.quantization,
                    "OUTRIDER_KV_BUDGET_BYTES": self.kv_budget_bytes,
                    "OUTRIDER_MAX_SESSION_LEN": self.max_session_len,
                }
            ),
            **self._placement(self.device),
            **self._drafter_within(),
            **self.target_environment,
        }
        for number in range(self.num_targets):
            spec = self._spec(f"target-{number}", "target_service", settings)
            yield replace(spec, cores=self.target_cores, num_ranks=self.tensor_parallel)

    def _drafter_within(self) -> dict[str, str]:
        """Return the settings of the drafter within the targets; none where there is none."""
        draft = next((item for item in self.drafts if item.at == AT_TARGET), None)
        if draft is None:
            return {}
        settings = {"OUTRIDER_COLOCATED_DRAFTER": draft.drafter}
        if draft.drafter not in LOOKUPS:
            settings["OUTRIDER_COLOCATED_MODEL"] = draft.model or self.model
        if draft.main == "layers":
            settings["OUTRIDER_COLOCATED_NUM_LAYERS"] = str(draft.num_layers)
        return {**settings, **draft.environment}

    def draft_specs(self) -> Iterator[ProcessSpec]:
        """Yield how to start each draft."""
        numbers: Counter[str] = Counter()
        for draft in (item for item in self.drafts if item.at == AT_SERVICE):
            settings = {
                "OUTRIDER_DRAFTER": draft.drafter,
                "OUTRIDER_NUM_THREADS": str(draft.num_threads),
                **_given({"OUTRIDER_MAX_SESSION_LEN": self.max_session_len}),
            }
            if draft.drafter not in LOOKUPS:
                placement = self._placement(self.draft_device or self.device)
                settings |= {"OUTRIDER_MODEL": draft.model or self.model, **placement}
            if draft.main in HEADS and draft.model not in ("", EMBEDDED) and not _manifest(draft.model).is_file():
                # Published heads do not name the target that they were made for.
                settings["OUTRIDER_TARGET"] = os.environ.get("OUTRIDER_TARGET", self.model)
            if draft.main == "layers":
                settings["OUTRIDER_NUM_LAYERS"] = str(draft.num_layers)
            for _ in range(draft.num_replicas):
                # Two kinds of drafts may run the same drafter, on different models.
                name = f"draft-{draft.drafter}-{numbers[draft.drafter]}"
                numbers[draft.drafter] += 1
                yield self._spec(name, "draft_service", {**settings, **draft.environment})

    def orchestrator_specs(self, addresses: Mapping[str, str]) -> Iterator[ProcessSpec]:
        """Yield how to start each orchestrator, at addresses that are free now.

        Args:
            addresses: the settings that name Redis and the workers, and those that follow from the workers.

        Raises:
            Unavailable: no port is free.
        """
        places = chosen_addresses(self.address, self.num_orchestrators)
        web = chosen_addresses(self.http_address, self.num_orchestrators, places)
        names = ",".join(self.served_model_names)
        about = {"OUTRIDER_SERVED_MODEL_NAMES": names, "OUTRIDER_GENERATION_CONFIG": self.generation_config}
        for number, (address, http_address) in enumerate(zip(places, web, strict=True)):
            listening = {"OUTRIDER_ADDRESS": address, "OUTRIDER_HTTP_ADDRESS": http_address}
            settings = {**listening, **_given(about), **addresses, **self.orchestrator_environment}
            yield self._spec(f"orchestrator-{number}", "orchestrator", settings)

    def _placement(self, device: str) -> dict[str, str]:
        return _given({"OUTRIDER_DTYPE": self.dtype, "OUTRIDER_DEVICE": device})

    def _spec(self, name: str, module: str, settings: Mapping[str, str]) -> ProcessSpec:
        life = {
            "OUTRIDER_ADDRESS": "127.0.0.1:0",
            "OUTRIDER_DRAIN_BUDGET_S": str(self.drain_budget_s),
            "OUTRIDER_LOG_FORMAT": os.environ.get("OUTRIDER_LOG_FORMAT", "text"),
            # One address for all processes; it would fail all but the first.
            "OUTRIDER_HEALTH_ADDRESS": "",
            "OUTRIDER_METRICS_ADDRESS": "127.0.0.1:0" if self.exposes_metrics else "",
            # Has the hub's client draw the bars of downloads into the log.
            "TQDM_POSITION": "-1",
        }
        return ProcessSpec(name, module, {**life, **settings}, self.drain_budget_s)


def _given(settings: Mapping[str, str | int]) -> dict[str, str]:
    """Return the settings that have a value: the services' defaults, and the environment, stand for the others."""
    return {name: str(value) for name, value in settings.items() if value}


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidArgument(f"{name} is {value}, must be at least {least}", name)
