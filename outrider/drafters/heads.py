"""Loading a drafter over a head that takes its target's features."""

import hashlib
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from outrider import native
from outrider.drafters.block import BlockDrafter
from outrider.drafters.choices import TreeOptions
from outrider.drafters.drafter import Drafter, DrafterInfo
from outrider.drafters.eagle3 import Eagle3Drafter, HeadOptions
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.options import DrafterKind, DrafterOptions
from outrider.drafters.shares import PREFILL_CHUNK_LEN
from outrider.errors import ModelUnsupported
from outrider.grammar.compiler import GrammarCompiler
from outrider.lm import embedded
from outrider.lm.heads.block import BlockHead
from outrider.lm.heads.block_passes import BlockPasses
from outrider.lm.heads.checkpoint import (
    DraftManifest,
    feature_layers_of,
    load_block,
    load_eagle3,
    load_manifest,
    load_medusa,
)
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.heads.files import OutputRows
from outrider.lm.heads.parallel import ParallelHead
from outrider.lm.heads.passes import HeadPasses
from outrider.lm.heads.published import load_published_block
from outrider.lm.heads.shared import SharedWeights, read_shared
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.lm.hub import local_folder
from outrider.lm.load_options import chosen_device
from outrider.lm.packed_linear import pack_linears

_MAX_NODES: Final = 7
"""With the base they are eight rows of the target's pass; a CPU computes rows by fours."""


def load_head_drafter(settings: DrafterOptions) -> Drafter:
    """Return the drafter over the head in the folder that the settings name; `embedded` is one that is shipped.

    Raises:
        ModelUnsupported: the head, or what it shares with its target, is missing or does not fit.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    is_shipped = settings.model == embedded.NAME
    folder = embedded.head_folder(settings.drafter.value) if is_shipped else local_folder(settings.model)
    manifest = load_manifest(folder)
    if manifest is not None and manifest.method != settings.drafter.value:
        raise ModelUnsupported(f"{folder} has a draft of kind {manifest.method}, not {settings.drafter.value}")
    target = settings.target or (manifest.target if manifest else "")
    if not target:
        raise ModelUnsupported(f"{folder} does not name the target that it was made for: set OUTRIDER_TARGET")
    shared = read_shared(target)
    if manifest is not None:
        _check_width(folder, manifest.hidden_size, shared)
    device = torch.device(chosen_device(settings.device))
    tree = TreeOptions(settings.max_nodes or _MAX_NODES)
    make = _medusa if settings.drafter is DrafterKind.MEDUSA else _columns
    drafter = make(settings, folder, manifest, shared, device, tree)
    if shared.tokenizer is not None:
        drafter.compiler = GrammarCompiler(shared.tokenizer, drafter.info.vocabulary_size, shared.eos_token_ids)
    return drafter


def _columns(
    settings: DrafterOptions,
    folder: Path,
    manifest: DraftManifest | None,
    shared: SharedWeights,
    device: torch.device,
    tree: TreeOptions,
) -> Drafter:
    is_block = settings.drafter is DrafterKind.BLOCK
    head, vocabulary = (_load_block if is_block else load_eagle3)(folder, shared.output_layer.__getitem__)
    _check_fit(folder, head.config.target_hidden_size, vocabulary, shared)
    layers = manifest.feature_layers if manifest else feature_layers_of(folder, shared.num_layers)
    info = _describe(settings, head, vocabulary, manifest, shared, layers, device)
    options = HeadOptions(settings.kv_budget_bytes, PREFILL_CHUNK_LEN, tree)
    embedding = shared.embedding.to(device, torch.bfloat16)
    head.to(device)
    if isinstance(head, ParallelHead):
        head.share(embedding)
        return BlockDrafter(head, vocabulary, info, options)
    if isinstance(head, BlockHead):
        return BlockDrafter(BlockPasses(head, embedding), vocabulary, info, options)
    return Eagle3Drafter(HeadPasses(head, embedding), vocabulary, info, options)


def _load_block(folder: Path, output_rows: OutputRows) -> tuple[Eagle3Head | ParallelHead, DraftVocabulary]:
    """Return a block head: one of others, or one that `outrider distill` made."""
    return load_published_block(folder, output_rows) or load_block(folder, output_rows)


def _medusa(
    settings: DrafterOptions,
    folder: Path,
    manifest: DraftManifest | None,
    shared: SharedWeights,
    device: torch.device,
    tree: TreeOptions,
) -> Drafter:
    heads, vocabulary = load_medusa(folder, shared.output_layer.__getitem__)
    _check_fit(folder, heads.lm_head.in_features, vocabulary, shared)
    info = _describe(settings, heads, vocabulary, manifest, shared, (shared.num_layers,), device)
    pack_linears(heads.to(device), joins=False)
    return MedusaDrafter(heads, vocabulary, info, tree, device)


def _check_fit(folder: Path, hidden_size: int, vocabulary: DraftVocabulary, shared: SharedWeights) -> None:
    _check_width(folder, hidden_size, shared)
    num_mapped, num_tokens = vocabulary.target_size, len(shared.embedding)
    if num_mapped != num_tokens:
        raise ModelUnsupported(f"the vocabulary map of {folder} has {num_mapped} tokens, the target has {num_tokens}")


def _check_width(folder: Path, hidden_size: int, shared: SharedWeights) -> None:
    width = shared.embedding.shape[1]
    if hidden_size != width:
        raise ModelUnsupported(f"{folder} takes features of {hidden_size} numbers, the target has {width}")


def _describe(
    settings: DrafterOptions,
    head: torch.nn.Module,
    vocabulary: DraftVocabulary,
    manifest: DraftManifest | None,
    shared: SharedWeights,
    layers: tuple[int, ...],
    device: torch.device,
) -> DrafterInfo:
    """Return the drafter's identity; the head is still on the device where it was loaded, and will run on `device`."""
    weights = dict(head.state_dict())
    in_bytes = (
        isinstance(head, Eagle3Head | ParallelHead) and device.type == "cpu" and native.best_variant() is not None
    )
    return DrafterInfo(
        drafter=settings.drafter.value,
        model=settings.model,
        model_fingerprint=_fingerprint(weights),
        tokenizer_fingerprint=manifest.tokenizer_fingerprint if manifest else "",
        numerics=f"{device.type} {'bytes' if in_bytes else 'bfloat16'} torch-{torch.__version__}",
        vocabulary_size=vocabulary.target_size,
        max_session_len=min(shared.max_len or settings.max_session_len, settings.max_session_len),
        eos_token_ids=shared.eos_token_ids,
        feature_layers=layers,
        hidden_size=shared.embedding.shape[1],
        target_fingerprint=manifest.target_fingerprint if manifest else "",
    )


def _fingerprint(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, item in sorted(weights.items()):
        digest.update(name.encode() + item.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
