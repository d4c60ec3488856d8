"""What a transformers model says of itself: identity, limits, and what its bits depend on."""

from typing import Final

import torch
from transformers import PreTrainedModel

from outrider.lm.compilation import find_layers
from outrider.lm.fingerprint import model_fingerprint, weights_fingerprint
from outrider.lm.model import ModelInfo

_UNBOUNDED_LEN: Final = 1 << 20


def describe(model: PreTrainedModel, name: str, tokenizer_fingerprint: str) -> ModelInfo:
    """Return identity and limits of a model as it was loaded; `numerics` without its kernels, `kv_token_bytes` 0.

    Args:
        model: on its device.
        name: of the model, as configured.
        tokenizer_fingerprint: see `ModelInfo`.
    """
    config = model.config.get_text_config()
    return ModelInfo(
        name=name,
        fingerprint=model_fingerprint(model),
        tokenizer_fingerprint=tokenizer_fingerprint,
        numerics=_numerics(model.device, str(model.dtype).removeprefix("torch.")),
        vocabulary_size=config.vocab_size,
        max_session_len=getattr(config, "max_position_embeddings", None) or _UNBOUNDED_LEN,
        eos_token_ids=_eos_token_ids(model),
        kv_token_bytes=0,
        num_layers=len(find_layers(model, config.num_hidden_layers)),
        hidden_size=config.hidden_size,
        weights_fingerprint=weights_fingerprint(model),
    )


def linear_kind(model: PreTrainedModel, packed: str) -> str:
    """Return the kind of a model's linear layers: its quantisation, else that of the packed ones, else `plain`."""
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is None:
        return packed or "plain"
    method = quantization["quant_method"] if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(method, "value", method))


def _numerics(device: torch.device, dtype: str) -> str:
    """Return what the bits of products depend on: of a CPU its threads, of a GPU which one it is."""
    version = f"{dtype} torch-{torch.__version__}"
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device).replace(' ', '-')} {version}"
    return f"{device.type} {version} threads-{torch.get_num_threads()}"


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = model.generation_config
    eos = generation.eos_token_id if generation is not None else None
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
