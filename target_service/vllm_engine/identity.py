"""The identity of a model that vLLM has loaded."""

import logging
from pathlib import Path
from typing import Any, Final

import torch
import vllm

from outrider.errors import InvalidArgument
from outrider.lm.tokenizer import TokenizerFiles, tokenizer_files
from outrider.parameters import AcceptanceRule, SamplingParameters
from target_service.engine.identity import TargetIdentity
from target_service.settings import TargetSettings
from target_service.vllm_engine.checkpoint import checkpoint_folder
from target_service.vllm_engine.weights import files_fingerprint, weights_fingerprint

_LOG: Final = logging.getLogger(__name__)
_UNSPECULATED: Final = ("min_p",)
"""Defaults of a model that vLLM refuses while it verifies proposals."""


def identity_of(llm: Any, settings: TargetSettings) -> TargetIdentity:
    """Return the identity of the model of `vllm.v1.engine.llm_engine.LLMEngine`."""
    config = llm.vllm_config
    model = config.model_config
    folder = checkpoint_folder(model.model, model.revision)
    tokenizer = _tokenizer(llm)
    vocabulary_size = model.get_vocab_size()
    return TargetIdentity(
        model=settings.model,
        model_fingerprint=_model_fingerprint(config, folder),
        tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else "",
        numerics=_numerics(config),
        vocabulary_size=vocabulary_size,
        max_session_len=min(model.max_model_len, settings.max_session_len),
        kv_budget_bytes=0,
        eos_token_ids=_eos_token_ids(llm, vocabulary_size),
        acceptance_rules=(AcceptanceRule.ENGINE,),
        weights_fingerprint=weights_fingerprint(folder, ties_head=_ties_head(model)),
        default_parameters=_default_parameters(config),
        tokenizer_files=tokenizer.files if tokenizer else {},
        grammar_library=f"vllm {vllm.__version__}" if tokenizer else "",
    )


def _model_fingerprint(config: Any, folder: Path) -> str:
    """Return a hash of architecture and weights. The own engine's of the same model is another one: rules differ."""
    identity = f"vllm {config.model_config.quantization} {config.model_config.hf_config.to_json_string(use_diff=True)}"
    return files_fingerprint(folder, identity)


def _numerics(config: Any) -> str:
    model, parallel = config.model_config, config.parallel_config
    parts = (
        config.device_config.device_type,
        str(model.dtype).removeprefix("torch."),
        f"vllm-{vllm.__version__}",
        f"torch-{torch.__version__}",
        f"tensor-{parallel.tensor_parallel_size}",
        # Its kernels sum in the order of the batch, and its noise is not keyed by the request.
        "varying",
    )
    return " ".join(parts)


def _tokenizer(llm: Any) -> TokenizerFiles | None:
    tokenizer = llm.tokenizer
    if tokenizer is None or not hasattr(tokenizer, "backend_tokenizer"):
        _LOG.warning("the model has no tokenizer that orchestrators can load: requests must have token ids")
        return None
    return tokenizer_files(tokenizer)


def _eos_token_ids(llm: Any, vocabulary_size: int) -> tuple[int, ...]:
    """Return the end-of-text tokens as the own engine finds them: those of generation_config.json, else the model's."""
    model = llm.vllm_config.model_config
    found = model.try_get_generation_config().get("eos_token_id")
    if found is None:
        found = getattr(model.hf_text_config, "eos_token_id", None)
    listed = [] if found is None else [found] if isinstance(found, int) else list(found)
    return tuple(token_id for token_id in listed if 0 <= token_id < vocabulary_size)


def _ties_head(model: Any) -> bool:
    return bool(getattr(model.hf_text_config, "tie_word_embeddings", False))


def _default_parameters(config: Any) -> dict[str, float]:
    found = dict(config.model_config.get_diff_sampling_param())
    if "max_tokens" not in found and "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
    chosen = {name: found[name] for name in names if found.get(name) is not None}
    for name in _UNSPECULATED if config.speculative_config is not None else ():
        if chosen.pop(name, None) is not None:
            _LOG.warning("%s of the model's generation_config.json is left out: vLLM does not verify with it", name)
    try:
        SamplingParameters(**chosen)
    except (InvalidArgument, TypeError) as error:
        _LOG.warning("the model's generation_config.json recommends nothing: %s", error)
        return {}
    return chosen
