"""Distillation of a draft: data, training, measurement, and the draft's folder."""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch

from outrider.errors import InvalidArgument
from outrider.lm.heads.checkpoint import load_eagle3_or_block
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.lm.load_options import LoadOptions
from outrider.lm.loading import load_model
from outrider.training.corpus import Corpus, load_corpus
from outrider.training.cost import cost_ratio, predicted_speedup
from outrider.training.drafts import num_trained, save_draft
from outrider.training.memory import keep_freed_memory
from outrider.training.methods import Method, make_method
from outrider.training.options import DistillOptions, MethodKind
from outrider.training.report import Results, draw_curve, write_card
from outrider.training.synthesis import Synthesis, SynthesisOptions, read_prompts
from outrider.training.teacher import Teacher, check_corpus
from outrider.training.teacher_batches import TeacherBatchStore
from outrider.training.trainer import Curve, Progress, Trainer

TREE: Final = (4, 2, 1, 1)
"""Children per node at each depth of the tree whose acceptance is measured besides that of chains."""

_STATE_BYTES: Final = 2
_MAX_MEASURED: Final = 256


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The source of conversations: `corpus`, else answers to `prompts`, else the target generates both sides.

    Attributes:
        corpus: file or folder of conversations, in the format of `load_corpus`.
        prompts: file of JSON lines, in the format of `read_prompts`, which the target answers.
        synthesis: options of the generation of conversations.
        kv_budget_bytes: maximum memory of the KV cache during generation.
    """

    corpus: Path | None = None
    prompts: Path | None = None
    synthesis: SynthesisOptions = field(default_factory=SynthesisOptions)
    kv_budget_bytes: int = 2 << 30


class Reporter(Protocol):
    """A receiver of the progress of a distillation."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Report that `done` of `total` units of a stage are done."""

    def training(self, progress: Progress) -> None:
        """Report that a training step is done."""


def distill(options: DistillOptions, data: DataOptions, command: str, reporter: Reporter) -> Results:
    """Distill a draft into `options.output`; resume an interrupted run with the same options.

    Raises:
        InvalidArgument: an option or the data is invalid, or contradicts another option.
        ModelUnsupported: the target cannot have a draft of this kind.
    """
    keep_freed_memory()
    started_s = time.monotonic()
    work = options.output / "work"
    work.mkdir(parents=True, exist_ok=True)
    corpus, source = _corpus(options, data, work, reporter)
    teacher = Teacher(options.target, options.device)
    check_corpus(corpus, teacher)
    train, held_out = corpus.cut(options.max_len).split(options.held_out)
    held_out = held_out.select(range(min(len(held_out), _MAX_MEASURED)))
    if not len(train) or not len(held_out):
        raise InvalidArgument(f"{len(corpus)} conversations are too few for training and measurement", "data")
    counts = torch.from_numpy(train.counts(teacher.vocabulary_size))
    if options.start is not None:
        vocabulary = load_eagle3_or_block(options.start, teacher.output_layer.__getitem__)[1]
    else:
        vocabulary = DraftVocabulary.most_frequent(counts, options.draft_vocab_size, teacher.eos_token_ids)
    method = make_method(teacher, vocabulary, options)
    batches = _store(teacher, train, work / "train", options)
    measured = _store(teacher, held_out, work / "held_out", options)
    trainer = Trainer(method, vocabulary, batches, measured, options, work)
    for store in (measured, batches) if trainer.resume() else (measured,):
        for done in store.fill(options.tokens_per_batch):
            reporter.stage("teacher outputs", done, len(store.corpus.token_ids))
    trainer.run(time.monotonic() - started_s, reporter.training)
    results = _results(options, teacher, method, vocabulary, trainer, (train, held_out), source, command)
    save_draft(method, vocabulary, teacher, options)
    draw_curve(options.output / "curve.png", Curve(work / "curve.jsonl").points())
    write_card(options.output, results)
    for folder in (work / "train", work / "held_out"):
        shutil.rmtree(folder, ignore_errors=True)
    return results


def _corpus(options: DistillOptions, data: DataOptions, work: Path, reporter: Reporter) -> tuple[Corpus, str]:
    if data.corpus is not None:
        return load_corpus(data.corpus), data.corpus.name
    folder = work / "data"
    _synthesise(options, data, folder, reporter)
    kind = f"the prompts of {data.prompts.name}" if data.prompts else "its own prompts"
    return load_corpus(folder), f"generated by the target from {kind}, half of it greedily, half at temperature 1"


def _synthesise(options: DistillOptions, data: DataOptions, folder: Path, reporter: Reporter) -> None:
    loaded = load_model(
        options.target, LoadOptions(device=options.device, kv_budget_bytes=data.kv_budget_bytes, compiles=True)
    )
    tokenizer = Teacher.tokenizer_of(options.target)
    prompts = None
    if data.prompts is not None:
        if tokenizer is None:
            raise InvalidArgument("the target has no tokenizer, which prompts require", "prompts")
        prompts = read_prompts(data.prompts, tokenizer)
    synthesis = Synthesis(loaded.model, tokenizer, folder, data.synthesis, prompts)
    for done in synthesis.run():
        reporter.stage("conversations", done, synthesis.num_conversations)


def _store(teacher: Teacher, corpus: Corpus, folder: Path, options: DistillOptions) -> TeacherBatchStore:
    num_bytes = len(corpus.token_ids) * teacher.hidden_size * 4 * _STATE_BYTES
    return TeacherBatchStore(teacher, corpus, folder if num_bytes <= options.max_store_bytes else None)


def _results(
    options: DistillOptions,
    teacher: Teacher,
    method: Method,
    vocabulary: DraftVocabulary,
    trainer: Trainer,
    corpora: tuple[Corpus, Corpus],
    source: str,
    command: str,
) -> Results:
    chain = trainer.measure((1,) * options.depth)
    tree = TREE[: options.depth] + (1,) * (options.depth - len(TREE))
    ratio = cost_ratio(teacher, method)
    num_guesses = 1 if options.method in (MethodKind.MEDUSA, MethodKind.BLOCK) else options.depth
    kind = bool(chain[True].num_rounds)
    return Results(
        method=options.method.value,
        target=options.target,
        data=source,
        num_train=len(corpora[0]),
        num_held_out=len(corpora[1]),
        num_steps=trainer.num_steps,
        num_tokens=trainer.num_tokens,
        trained_s=trainer.trained_s,
        num_weights=num_trained(method.module),
        draft_vocab_size=len(vocabulary),
        acceptance={"chain": chain, f"tree {'x'.join(map(str, tree))}": trainer.measure(tree)},
        cost_ratio=ratio,
        predicted_speedup=predicted_speedup(chain[kind].mean_acceptance_length, num_guesses, ratio),
        command=command,
    )
