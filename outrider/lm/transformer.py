"""A `LanguageModel` that runs any causal LM of transformers with Outrider's paged attention."""

import hashlib
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from transformers import PreTrainedModel

from outrider import native
from outrider.control.pass_times import MULTIPLES_OF_FOUR, PaddedSizes
from outrider.errors import ModelUnsupported
from outrider.lm import attention
from outrider.lm.attention import native as native_attention
from outrider.lm.code_key import code_key
from outrider.lm.compilation import can_compile, compile_layers, find_layers, num_together, uncompile_layers
from outrider.lm.description import describe, linear_kind
from outrider.lm.exported_pass import ExportedPass
from outrider.lm.features import FeatureStore
from outrider.lm.gpu_passes import NUM_ROWS, GpuPasses, make_gpu_passes
from outrider.lm.kv_blocks import KVBlocks
from outrider.lm.kv_cache import PagedKVCache
from outrider.lm.kv_storage import KVStorage
from outrider.lm.layer_group import LayerGroup
from outrider.lm.model import ModelInfo, SessionStep
from outrider.lm.packed_linear import are_all_packed, pack_linears
from outrider.lm.pages import KVUsage, PagePool
from outrider.lm.pass_plan import PassPlan, paged_cache, plan_pass
from outrider.lm.probe import PROBE_LEN, has_equal_bits, is_close, run_as_branch
from outrider.lm.ranks import Ranks
from outrider.lm.rows import has_experts, scales_by_longest

_LOG: Final = logging.getLogger(__name__)
_PAGE_LEN: Final = native_attention.PAGE_LEN
_MIN_PAGES: Final = 4
_PACKED_SIZES: Final = {"native": PaddedSizes(2, 2), "amx": PaddedSizes(2, 2), "packed": PaddedSizes(6, 2)}
"""Compiled layers would be compiled again for one row. oneDNN's kernel takes six at once: on one core a 16,384 x 2,048
layer takes 3.0 ms for 4, 5 and 6 rows, 3.9 for 7, 4.2 for 8, 4.9 for 12, 6.0 for 16."""
_UNCOMPILED: Final = "layers-uncompiled"
_LAYERS_COMPILED: Final = "layers-compiled"
_COMPILED: Final = "pass-compiled"
_GPU_SIZES: Final = PaddedSizes(16, 16)
"""Finer than the parts of a pass: with long contexts the attention of each further row takes its time."""

AnyPass = attention.BlockPass | attention.GpuPass | attention.NativePass | attention.SdpaPass | attention.ShapePass


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of running a model.

    Attributes:
        kv_budget_bytes: maximum memory of the KV cache of all sessions.
        compiles: whether to compile the layers, if the device supports it.
        packs: whether to pack bfloat16 weights for the CPU, if that is supported; see `packed_linear`.
        ranks: the tensor-parallel processes; None for a single process. Split weights are neither compiled nor packed.
            All ranks must construct their model at the same time.
        invariant: whether a position's bits must not depend on the batch. If not, long prompts are faster and keys and
            values take half of the memory (in 16 bits), but layers are not compiled.
    """

    kv_budget_bytes: int = 1 << 30
    compiles: bool = False
    packs: bool = True
    ranks: Ranks | None = None
    invariant: bool = True


class TransformersModel:
    """A loaded transformers model with batch-invariant paged attention (see `attention`).

    The constructor runs a few probe passes. It rejects models with layers that do not use the attention interface, or
    with state that cannot roll back. If bits depend on the batch, `info.numerics` ends with `varying`, else with
    `invariant`.

    Args:
        name: name of the model, as configured.
        model: model in evaluation mode, on its device.
        tokenizer_fingerprint: see `ModelInfo`.
        options: see `EngineOptions`; the defaults if None.

    Raises:
        ModelUnsupported: the model cannot be served exactly, or the KV cache budget is too small; the message has the
            reason.
    """

    def __init__(
        self, name: str, model: PreTrainedModel, tokenizer_fingerprint: str, options: EngineOptions | None = None
    ) -> None:
        options = options or EngineOptions()
        self._model = model
        self._device = model.device
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        info = describe(model, name, tokenizer_fingerprint)
        # After the fingerprint, which reads the weights as they were loaded.
        self._ranks: Ranks | None = None
        self._gpu_passes: GpuPasses | None = None
        self._exported_pass: ExportedPass | None = None
        self._invariant = options.invariant
        variant = native.best_variant() if options.invariant and self._device.type == "cpu" else None
        self._is_native = variant is not None
        compiles = options.compiles and options.invariant and not options.ranks and can_compile(self._device)
        if compiles and not self._is_native:
            _LOG.warning("the model runs uncompiled: there are no native operators for this machine")
            compiles = False
        packed = pack_linears(model, joins=compiles) if options.packs and not options.ranks else ""
        # Products of weights that are not packed vary with the number of rows, unless it is a multiple of four.
        sizes = _PACKED_SIZES.get(packed, MULTIPLES_OF_FOUR) if are_all_packed(model) else MULTIPLES_OF_FOUR
        self._sizes = sizes
        shapes = self._find_shapes()
        kv_dtype = self._kv_dtype(shapes)
        token_bytes = sum(shape.num_values for shape in shapes.shapes) * kv_dtype.itemsize
        num_pages = options.kv_budget_bytes // (_PAGE_LEN * token_bytes)
        if num_pages < _MIN_PAGES:
            raise ModelUnsupported(
                f"the KV cache budget of {options.kv_budget_bytes} bytes holds {num_pages} pages of {_PAGE_LEN} "
                f"tokens, {_PAGE_LEN * token_bytes} bytes each; at least {_MIN_PAGES} are needed"
            )
        self._storage = KVStorage(
            shapes.shapes,
            num_pages + 1,
            _PAGE_LEN,
            kv_dtype,
            self._device,
            reads_masked=not self._is_native,
            by_heads=self._is_native,
        )
        shapes.attach(self._storage, -1 if variant is None else int(variant))
        self._pool, self._features = self._pages(num_pages, token_bytes, info)
        compiled = self._compile() if compiles else _UNCOMPILED
        self._gpu_passes = self._made_gpu_passes(options)
        if self._gpu_passes:
            info, sizes = replace(info, part_rows=NUM_ROWS), _GPU_SIZES
        kernel = self._kernel(kv_dtype)
        numerics = f"{info.numerics} attention-{kernel}-{str(kv_dtype).removeprefix('torch.')}"
        split = f" ranks-{options.ranks.num}" if options.ranks else ""
        numerics = f"{numerics} linear-{linear_kind(model, packed)} {compiled}{split}"
        info = replace(info, numerics=numerics, padded_sizes=sizes, kv_token_bytes=token_bytes)
        # Without invariant kernels, bits that are equal in the probes may differ for other lengths.
        is_row_by_row = not scales_by_longest(model) and (self._device.type == "cpu" or self._runs_row_by_row())
        is_invariant = has_equal_bits(self, info.vocabulary_size) and options.invariant and is_row_by_row
        self._info = replace(info, numerics=f"{info.numerics} {'invariant' if is_invariant else 'varying'}")
        # A new pool, without the pages of the probes.
        self._pool, self._features = self._pages(num_pages, token_bytes, self._info)
        # Until here, all ranks have run the same probes in parallel; from now on rank 0 broadcasts plans.
        self._ranks = options.ranks
        # With split weights each rank has only a part of every page.
        self._blocks = None if options.ranks else KVBlocks(self._storage, self._pool, self._features)

    @property
    def info(self) -> ModelInfo:
        """Identity and limits."""
        return self._info

    @property
    def features(self) -> FeatureStore | None:
        """Features for drafts; None if the model has no list of layers."""
        return self._features if self._info.num_layers else None

    @property
    def blocks(self) -> KVBlocks | None:
        """KV blocks that can be stored outside of the process; None if the weights are split."""
        return self._blocks

    @property
    def kv_usage(self) -> KVUsage:
        """Occupancy of the KV cache."""
        return self._pool.usage

    def new_cache(self, salt: bytes = b"") -> PagedKVCache:
        """Return an empty KV cache for one session, which shares pages only with sessions of the same salt."""
        return PagedKVCache(self._pool, salt)

    @torch.no_grad()
    def forward(self, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
        """Run one pass over all steps; see `LanguageModel.forward`."""
        plan = plan_pass(steps, _PAGE_LEN)
        logits = (
            self._ranks.run(plan.to_numbers(), lambda: self._run_plan(plan)) if self._ranks else self._run_plan(plan)
        )
        if self._device.type == "cuda":
            # Callers measure how long a pass takes, and errors of the device belong to it.
            torch.cuda.current_stream(self._device).synchronize()
        for step in steps:
            paged_cache(step).mark_run()
        return _split(logits, steps)

    @torch.no_grad()
    def follow(self, numbers: Sequence[int]) -> None:
        """Run this rank's part of a pass that rank 0 planned; see `Ranks.follow`."""
        self._run_plan(PassPlan.from_numbers(numbers))

    def _run_plan(self, plan: PassPlan) -> torch.Tensor:
        """Return the logits of the wanted rows: [wanted, V]."""
        self._storage.prepare(plan.new_pages, plan.copies)
        self._features.prepare(plan.copies)
        if self._gpu_passes:
            return self._gpu_passes.run(plan, self._features)
        wanted, made = plan.wanted or [0], self._made(plan.rows)
        if self._exported_pass is not None and isinstance(made, attention.NativePass):
            inputs = (self._row(plan.token_ids), self._row(plan.positions), self._wanted(wanted), made.layout)
            logits, features = self._exported_pass.run(*inputs, self._features.layers)
            self._features.hold(features)
        else:
            logits = self._run(plan.token_ids, plan.positions, wanted, made)
        self._features.write(plan.rows)
        return logits

    def _made_gpu_passes(self, options: EngineOptions) -> GpuPasses | None:
        if self._device.type != "cuda" or not options.invariant:
            return None
        # Where rows affect each other a pass waits for the GPU halfway, which no graph can hold. Sums over ranks were
        # never tried in one.
        captures = options.ranks is None and not has_experts(self._model) and not scales_by_longest(self._model)
        passes = make_gpu_passes(self._run_rows, self._features, _PAGE_LEN, self._device, captures=captures)
        if passes is None and options.ranks:
            raise ModelUnsupported("ranks on GPUs need Triton and a C compiler: all of them must run the same kernels")
        return passes

    def _runs_row_by_row(self) -> bool:
        """Whether no row's output on a GPU depends on others: experts are multiplied with the rows that chose them."""
        return self._gpu_passes is not None and not has_experts(self._model)

    def _run_rows(self, token_ids: torch.Tensor, positions: torch.Tensor, made: attention.GpuPass) -> torch.Tensor:
        output = self._model(input_ids=token_ids, position_ids=positions, use_cache=False, outrider_pass=made)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _kernel(self, kv_dtype: torch.dtype) -> str:
        if not self._invariant:
            return "sdpa"
        if self._gpu_passes:
            return f"triton-{attention.GPU_BLOCK_LEN}"
        return native_attention.kernel(kv_dtype) if self._is_native else f"blocks-{attention.BLOCK_LEN}"

    def _made(self, rows: attention.PassRows) -> AnyPass:
        if self._is_native:
            return native_attention.lay_out(rows)
        return (attention.BlockPass if self._invariant else attention.SdpaPass)(rows, self._storage)

    def _run(
        self,
        token_ids: list[int],
        positions: list[int],
        wanted: list[int],
        made: AnyPass,
    ) -> torch.Tensor:
        output = self._model(
            input_ids=self._row(token_ids),
            position_ids=self._row(positions),
            use_cache=False,
            logits_to_keep=self._wanted(wanted),
            outrider_pass=made,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _row(self, values: list[int]) -> torch.Tensor:
        return torch.tensor([self._padded(values)], device=self._device)

    def _wanted(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor(self._padded(rows), device=self._device)

    def _padded(self, values: list[int]) -> list[int]:
        """Return the values padded to the rows of a pass with the last value."""
        return values + [values[-1]] * (self._sizes.padded(len(values)) - len(values))

    @torch.no_grad()
    def _find_shapes(self) -> attention.ShapePass:
        shapes = attention.ShapePass()
        try:
            self._run([3], [0], [0], shapes)
        except TypeError as error:
            raise ModelUnsupported(f"the model does not support Outrider's attention: {error}") from error
        missing = self._num_layers - len(set(shapes.modules))
        if missing:
            raise ModelUnsupported(
                f"{missing} of {self._num_layers} layers do not use the attention interface, and cannot roll back"
            )
        return shapes

    def _kv_dtype(self, shapes: attention.ShapePass) -> torch.dtype:
        if self._is_native:
            return native_attention.page_dtype(self._model.dtype, {shape.key_dim for shape in shapes.shapes})
        # float32 on CPUs: PyTorch's products of 16-bit keys are slower there and vary with the number of rows.
        return torch.float32 if self._device.type == "cpu" and self._invariant else self._model.dtype

    def _compile(self) -> str:
        """Compile the model and run it once; return what is compiled. What cannot be compiled runs as it is."""
        layers = find_layers(self._model, self._num_layers)
        if not layers:
            _LOG.warning("the model has no list of layers: it runs uncompiled")
            return _UNCOMPILED
        _LOG.info("compiling the model, which takes seconds, or longer the first time")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about its own code
            # More writes than rows: sizes that differ in the first pass become separate symbols.
            run = partial(run_as_branch, self, tuple(range(3, 3 + PROBE_LEN)))
            plain: list[torch.Tensor] = []
            try:
                groups = compile_layers(layers, num_together(layers, lambda: plain.append(run())))
                logits = run()
                codes = {code for group in groups for code in group.codes}
                # Rounding alone may choose other experts: then code is made at each start, and none is kept.
                if is_close(logits, plain[0]):
                    for code in codes:
                        code.save()
                elif any(code.is_kept for code in codes):
                    raise RuntimeError("compiled layers that were kept have other logits")
            except RuntimeError as error:
                _LOG.warning("the model runs uncompiled: %s", _first_line(error))
                uncompile_layers(layers)
                return _UNCOMPILED
            return self._compile_rest(groups, run, logits)

    def _compile_rest(self, groups: Sequence[LayerGroup], run: Callable[[], torch.Tensor], logits: torch.Tensor) -> str:
        """Compile what a pass runs around its layers, or find it as it was kept; return what is compiled.

        Args:
            groups: the compiled layers.
            run: runs a pass.
            logits: what it returned before.
        """
        key = code_key([self._model], [len(group.layers) for group in groups], ())
        if key is not None and self._has_kept(key, groups, run, logits):
            return _COMPILED
        try:
            recorded = self._exported_pass = ExportedPass(self._model, groups)
            if not torch.equal(run(), logits):
                raise RuntimeError("a recorded pass has other bits")
        except Exception as error:  # a call that no recorded one stands for may fail in any way
            self._exported_pass = None
            _LOG.info("between its layers the model runs as it is, a little slower: %s", _first_line(error))
            return _LAYERS_COMPILED
        try:
            compiled = self._exported_pass = recorded.compiled()
            if not is_close(run(), logits):
                raise RuntimeError("a compiled pass has other logits")
        except RuntimeError as error:
            self._exported_pass = recorded
            _LOG.info("what comes before and after the model's layers runs uncompiled: %s", _first_line(error))
            return _LAYERS_COMPILED
        if key is not None:
            compiled.save(key)
        return _COMPILED

    def _has_kept(
        self, key: str, groups: Sequence[LayerGroup], run: Callable[[], torch.Tensor], logits: torch.Tensor
    ) -> bool:
        """Take the compiled pass that was kept, if there is one; return whether it was taken."""
        try:
            self._exported_pass = ExportedPass.load(key, self._model, groups)
            if self._exported_pass is not None and is_close(run(), logits):
                return True
        except Exception as error:  # what does not fit the model may fail in any way
            _LOG.debug("the pass that was kept cannot be taken: %r", error)
        self._exported_pass = None
        return False

    def _pages(self, num_pages: int, token_bytes: int, info: ModelInfo) -> tuple[PagePool, FeatureStore]:
        root = hashlib.sha256(f"{info.fingerprint} {info.numerics}".encode()).digest()
        pool = PagePool(num_pages, _PAGE_LEN, _PAGE_LEN * token_bytes, root)
        layers = find_layers(self._model, self._num_layers)
        return pool, FeatureStore(self._model.base_model, layers, info.hidden_size, self._storage, pool)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _split(logits: torch.Tensor, steps: Sequence[SessionStep]) -> list[torch.Tensor]:
    parts = []
    first = 0
    for step in steps:
        num = 1 + len(step.tree) if step.wants_logits else 0
        parts.append(logits[first : first + num])
        first += num
    return parts
