"""Writing of trained drafts to folders that a draft service loads."""

import torch

from outrider.lm.heads.checkpoint import DraftManifest, save_block, save_eagle3, save_medusa, save_vocabulary
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.training.methods import BlockMethod, Eagle3Method, LayersMethod, MedusaMethod, Method
from outrider.training.options import DistillOptions, MethodKind
from outrider.training.teacher import Teacher


def save_draft(method: Method, vocabulary: DraftVocabulary, teacher: Teacher, options: DistillOptions) -> None:
    """Write the draft with its manifest to `options.output`."""
    options.output.mkdir(parents=True, exist_ok=True)
    manifest = DraftManifest(
        method=options.method.value,
        target=teacher.name,
        target_fingerprint=teacher.fingerprint,
        tokenizer_fingerprint=teacher.tokenizer_fingerprint,
        hidden_size=teacher.hidden_size,
        feature_layers=_features_of(options.method, teacher),
        depth=options.depth,
        trimmed=options.trim,
    )
    match method:
        case Eagle3Method():
            save_eagle3(options.output, method.module, vocabulary, manifest)
        case BlockMethod():
            save_block(options.output, method.module, vocabulary, manifest)
        case MedusaMethod():
            save_medusa(options.output, method.module, vocabulary, manifest)
        case LayersMethod():
            _save_layers(method, vocabulary, teacher, manifest, options)


def _features_of(method: MethodKind, teacher: Teacher) -> tuple[int, ...]:
    """Return the target layers whose features a draft of this kind reads."""
    match method:
        case MethodKind.EAGLE3 | MethodKind.BLOCK:
            return teacher.feature_layers
        case MethodKind.MEDUSA:
            return (teacher.model.config.get_text_config().num_hidden_layers,)
        case MethodKind.LAYERS:
            return ()


def _save_layers(
    method: LayersMethod,
    vocabulary: DraftVocabulary,
    teacher: Teacher,
    manifest: DraftManifest,
    options: DistillOptions,
) -> None:
    dtype = teacher.model.dtype
    weights = {name: item.to(dtype) for name, item in method.model.state_dict().items()}
    method.model.config.dtype = dtype
    method.model.save_pretrained(options.output, state_dict=weights)
    if teacher.tokenizer is not None:
        teacher.tokenizer.save_pretrained(options.output)
    save_vocabulary(options.output, vocabulary)
    manifest.save(options.output)


def num_trained(module: torch.nn.Module) -> int:
    """Return the number of trainable weights."""
    return sum(item.numel() for item in module.parameters() if item.requires_grad)
