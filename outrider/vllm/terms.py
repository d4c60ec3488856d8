"""The terms under which a draft proposes for a request of vLLM."""

import hashlib
from typing import Any, Final

from outrider import wire
from outrider.errors import InvalidArgument
from outrider.parameters import MAX_TOKENS, SamplingParameters
from outrider.v1 import draft_pb2, tokens_pb2
from outrider.vllm.source import EngineRequest

_FENCING_TOKEN: Final = 1
"""Of every session: vLLM's process is the only one that knows its requests."""
_MAX_STOP_TOKEN_IDS: Final = 64


def is_draftable(request: EngineRequest) -> bool:
    """Return whether a draft has all that the request's text depends on: token ids, and nothing but these."""
    return request.sampling_params is not None and request.prompt_token_ids is not None and not request.mm_features


def open_message(
    request: EngineRequest, session_id: str, vocabulary_size: int, fingerprint: str
) -> draft_pb2.DraftOpen:
    """Return the frame that opens a request's session on a draft.

    Args:
        request: of vLLM; `is_draftable`.
        session_id: on the drafts.
        vocabulary_size: of the target.
        fingerprint: of its tokenizer; empty where it is not known.
    """
    sampling = request.sampling_params
    stop_token_ids = sorted(_stop_token_ids(sampling, vocabulary_size))
    return draft_pb2.DraftOpen(
        session_id=session_id,
        fencing_token=_FENCING_TOKEN,
        parameters=wire.parameters_to_message(_parameters(request)),
        acceptance_rule=tokens_pb2.ACCEPTANCE_RULE_COUPLED,
        prompt_len=request.num_prompt_tokens,
        tokenizer_fingerprint=fingerprint,
        stop_token_ids=stop_token_ids[:_MAX_STOP_TOKEN_IDS],
        cache_salt=_salt(request.cache_salt),
        request_id=request.request_id[: wire.MAX_NAME_LEN],
    )


def _parameters(request: EngineRequest) -> SamplingParameters:
    """Return greedy parameters with the request's penalties, which change the likeliest token.

    Values that drafts do not know are left out: a proposal that does not follow them is not accepted, and no more.
    """
    sampling, max_tokens = request.sampling_params, min(request.max_tokens, MAX_TOKENS)
    try:
        return SamplingParameters(
            temperature=0,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            ignore_eos=bool(sampling.ignore_eos),
        )
    except InvalidArgument:
        return SamplingParameters(temperature=0, max_tokens=max_tokens)


def _stop_token_ids(sampling: Any, vocabulary_size: int) -> set[int]:
    """Return the tokens that end the text; vLLM's `all_stop_token_ids` has the model's even where they end none."""
    given = sampling.stop_token_ids or () if sampling.ignore_eos else sampling.all_stop_token_ids
    return {token_id for token_id in given if 0 <= token_id < vocabulary_size}


def _salt(salt: str | None) -> bytes:
    """Return the salt as bytes; a hash of it, since it may be longer than drafts take."""
    return hashlib.sha256(salt.encode()).digest() if salt else b""
