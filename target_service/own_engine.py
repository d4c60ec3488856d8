"""Loads the engine of our own: a `LanguageModel`, its KV blocks in Redis, and a draft within the process."""

import asyncio
import logging
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from outrider.drafters.loading import load_drafter
from outrider.errors import InvalidArgument
from outrider.grammar import GRAMMAR_LIBRARY
from outrider.grammar.compiler import GrammarCompiler
from outrider.lm.load_options import LoadedModel, LoadOptions, chosen_device
from outrider.lm.loading import load_model
from outrider.lm.model import LanguageModel
from outrider.lm.ranks import Ranks, num_ranks
from outrider.lm.tokenizer import TOKENIZER_NAME
from outrider.parameters import REPLAYABLE_RULES
from target_service.engine.colocated import ColocatedDraft, check_colocated
from target_service.engine.engine import Engine
from target_service.engine.identity import TargetIdentity
from target_service.engine.request import Request
from target_service.kv_blocks.remote_blocks import RemoteBlocks
from target_service.kv_blocks.store import BlockStore
from target_service.loaded_engine import LoadedEngine
from target_service.settings import BlockUse, TargetSettings

_LOG: Final = logging.getLogger(__name__)
_MIN_SECRET_LEN: Final = 16
_KV_BLOCK_TTL_S: Final = 3600.0
"""Seconds until a KV block that is not used expires. A full store evicts blocks earlier."""
_KV_BLOCK_QUEUE_BYTES: Final = 256 << 20
"""Bytes of KV blocks that wait to be written: little memory beside a KV cache of gigabytes. Blocks without room are
dropped, and computed where they are missed."""


async def load(settings: TargetSettings) -> LoadedEngine[Request] | Callable[[], None]:
    """Return the engine; in a process that runs a part of the model for another one, the function that does so."""
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    ranks = Ranks(chosen_device(settings.device)) if num_ranks() > 1 else None
    # In a thread that ends: OpenMP keeps workers for every thread that ever computed, and with more workers than cores
    # they stop spinning between operations, which doubled the time of a pass (18 to 33 ms on 2 cores).
    with ThreadPoolExecutor(max_workers=1) as loader:
        options = LoadOptions(
            dtype=settings.dtype,
            device=settings.device,
            quantization=settings.quantization,
            kv_budget_bytes=settings.kv_budget_bytes,
            compiles=settings.compile,
            ranks=ranks,
            invariant=settings.invariant,
        )
        loop = asyncio.get_running_loop()
        loaded = await loop.run_in_executor(loader, load_model, settings.model, options)
        draft = await loop.run_in_executor(loader, colocated_draft, loaded.model, settings)
    if ranks is None:
        return _engine(loaded, settings, draft)
    if ranks.rank > 0:
        return lambda: _follow(loaded, ranks)
    return _engine(loaded, settings, draft, ranks)


def _engine(
    loaded: LoadedModel, settings: TargetSettings, draft: ColocatedDraft | None, ranks: Ranks | None = None
) -> LoadedEngine[Request]:
    blocks = remote_blocks(loaded.model, settings)
    compiler = grammar_compiler(loaded)
    engine = Engine(loaded.model, settings, blocks, draft, compiler)

    def close() -> None:
        if compiler is not None:
            compiler.close()
        if blocks is not None:
            blocks.close()
        if ranks is not None:
            ranks.leave()

    return LoadedEngine(engine, _identity(loaded, engine, settings), close)


def _identity(loaded: LoadedModel, engine: Engine, settings: TargetSettings) -> TargetIdentity:
    info = loaded.model.info
    return TargetIdentity(
        model=info.name,
        model_fingerprint=info.fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        numerics=info.numerics,
        vocabulary_size=info.vocabulary_size,
        max_session_len=engine.max_len,
        kv_budget_bytes=settings.kv_budget_bytes,
        eos_token_ids=info.eos_token_ids,
        acceptance_rules=REPLAYABLE_RULES,
        num_layers=info.num_layers,
        hidden_size=info.hidden_size,
        weights_fingerprint=info.weights_fingerprint,
        drafter=engine.drafter,
        default_parameters=loaded.default_parameters,
        tokenizer_files=loaded.tokenizer.files if loaded.tokenizer is not None else {},
        grammar_library=GRAMMAR_LIBRARY if loaded.tokenizer is not None and info.eos_token_ids else "",
    )


def grammar_compiler(loaded: LoadedModel) -> GrammarCompiler | None:
    """Return what compiles constraints for a model; None where it has no tokenizer."""
    if loaded.tokenizer is None:
        return None
    definition, info = loaded.tokenizer.files[TOKENIZER_NAME].decode(), loaded.model.info
    return GrammarCompiler(definition, info.vocabulary_size, info.eos_token_ids)


def _follow(loaded: LoadedModel, ranks: Ranks) -> None:
    """Run the passes that the first rank sends. Signals are ignored: the first rank needs this one while it drains."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if loaded.run is not None:
        ranks.follow(loaded.run)
    ranks.leave()


def colocated_draft(model: LanguageModel, settings: TargetSettings) -> ColocatedDraft | None:
    """Return the draft within this process; None where there is none.

    Raises:
        OutriderError: it does not fit the target.
    """
    if settings.drafter_options is None:
        return None
    drafter = load_drafter(settings.drafter_options)
    check_colocated(drafter, model)
    if model.features is not None and drafter.info.feature_layers:
        # Before the first session, so that all positions have them.
        model.features.keep(drafter.info.feature_layers)
    return ColocatedDraft(drafter, model.features)


def remote_blocks(model: LanguageModel, settings: TargetSettings) -> RemoteBlocks | None:
    """Return the model's KV blocks in Redis; None where they are off, or the model has none."""
    if not settings.kv_blocks_url or settings.kv_blocks is BlockUse.NEVER:
        return None
    if model.blocks is None:
        _LOG.warning("this model has no KV blocks to keep in Redis")
        return None
    store = BlockStore(settings.kv_blocks_url, timeout_s=settings.kv_blocks_timeout_s, ttl_s=_KV_BLOCK_TTL_S)
    numerics = f"{model.info.fingerprint} {model.info.numerics}"
    secret = kv_blocks_secret(settings)
    return RemoteBlocks(model.blocks, numerics, store, settings.kv_blocks, _KV_BLOCK_QUEUE_BYTES, secret)


def kv_blocks_secret(settings: TargetSettings) -> bytes:
    """Return the secret that seals KV blocks, empty without a file; raise `InvalidArgument` for a file without one."""
    if settings.kv_blocks_secret_file is None:
        return b""
    try:
        secret = settings.kv_blocks_secret_file.read_bytes().strip()
    except OSError as error:
        raise InvalidArgument(f"cannot be read: {error.strerror}", "kv_blocks_secret_file") from None
    if len(secret) < _MIN_SECRET_LEN:
        raise InvalidArgument(f"has {len(secret)} bytes, must have {_MIN_SECRET_LEN}", "kv_blocks_secret_file")
    return secret
