"""A model's pass as one list of calls: of PyTorch's operators, and of its groups of compiled layers.

Around and between its layers a model of transformers runs a thousand lines of Python, which take 1 ms of a pass of 17.
They are run once here, by torch.export, and what they called is kept. The operators are the same, and so are the bits.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from outrider.lm.attention.native import NativePass
from outrider.lm.code_store import load_code, save_code
from outrider.lm.compiled_code import FlatCall
from outrider.lm.graph_parts import compile_ends
from outrider.lm.kept_graph import graph_facts, graph_of
from outrider.lm.layer_group import LayerGroup, set_call

_library = torch.library.Library("outrider", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("layer_group(Tensor[] tensors, int number, int num_layers) -> Tensor[]")  # type: ignore[no-untyped-call]
_GROUP: Final = torch.ops.outrider.layer_group.default
"""Stands for a group's call while a pass is recorded."""

_EXAMPLE_SIZES: Final = (6, 4, 9)
"""Rows, wanted rows and numbers of the layout: sizes that differ become symbols of their own."""


def _outputs(tensors: Sequence[Tensor], _: int, num_layers: int) -> list[Tensor]:
    return [torch.empty_like(tensors[0]) for _ in range(num_layers)]


torch.library.register_fake("outrider::layer_group", _outputs, lib=_library)


class ExportedPass:
    """The pass of a model whose layers are compiled.

    Weights are not copied. The model's modules are left as they are; hooks of theirs do not run.

    Args:
        model: on a CPU.
        groups: all of its layers, in order.

    Raises:
        RuntimeError: the pass depends on more than its tensors, or on their sizes, or calls layers out of order.
    """

    def __init__(self, model: PreTrainedModel, groups: Sequence[LayerGroup]) -> None:
        recorder = _Recorder(model, groups)
        try:
            exported = recorder.export()
            if [call.group for call in recorder.calls] != list(groups):
                raise RuntimeError("its layers are not called in order")
            _check_sizes(exported)
        except Exception as error:
            raise RuntimeError(f"the pass cannot be exported: {error}") from error
        self._weights, self._has_named_weights = _take_weights(exported)
        self._graph = exported.graph
        self._calls = recorder.calls
        self._replace_groups()
        self._select(())

    @torch.no_grad()
    def compiled(self) -> "ExportedPass":
        """Return the pass with what comes before and after its layers compiled, which has other bits.

        Raises:
            RuntimeError: it cannot be compiled.
        """
        made = copy.copy(self)
        made._graph = fx.Graph()
        made._graph.output(made._graph.graph_copy(self._graph, val_map={}))
        compile_ends(made._graph, lambda node: isinstance(node.target, _GroupCall))
        made._select(self._layers)
        return made

    def save(self, key: str) -> None:
        """Keep a compiled pass for `load`; do nothing where that could not make the same.

        Args:
            key: of the model and its groups, which were called by the model's own code; see `code_key`.
        """
        is_called_alike = all((call.constants, call.spec) == call.group.called_with for call in self._calls)
        found = graph_facts(self._graph, self._calls)
        if self._has_named_weights and is_called_alike and found is not None:
            graph, parts = found
            save_code(key, [part.run for part in parts], {"weights": list(self._weights), "graph": graph})

    @classmethod
    def load(cls, key: str, model: PreTrainedModel, groups: Sequence[LayerGroup]) -> "ExportedPass | None":
        """Return the compiled pass that was kept; None where there is none.

        Args:
            key: see `save`.
            model: of that key.
            groups: all of its layers, in order. They have been called.
        """
        if (kept := load_code(key)) is None:
            return None
        parts, facts = kept
        held = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        named: dict[str, Tensor] = {f"model.{name}": tensor for tensors in held for name, tensor in tensors}
        made = cls.__new__(cls)
        made._weights, made._has_named_weights = {name: named[name] for name in facts["weights"]}, True
        made._calls = []
        for group in groups:
            made._calls.append(_GroupCall(group, *_like_last(made._calls, *group.called_with)))
        made._graph = graph_of(facts["graph"], parts, made._calls)
        made._select(())
        return made

    @torch.no_grad()
    def run(
        self, token_ids: Tensor, positions: Tensor, wanted: Tensor, layout: Tensor, layers: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the pass.

        Args:
            token_ids: int64 [1, rows], at least two rows.
            positions: int64 [1, rows].
            wanted: int64 [wanted], at least two.
            layout: int32; see `attention.native.lay_out`.
            layers: whose features are returned; see `FeatureStore`.

        Returns:
            The logits of the wanted rows, [wanted, V], and by layer the features of all rows, [1, rows, H].
        """
        if layers != self._layers:
            self._select(layers)
        logits, *features = self._run(*self._weights.values(), token_ids, positions, wanted, layout)
        return logits, dict(zip(layers, features, strict=True))

    def _replace_groups(self) -> None:
        for node in self._graph.find_nodes(op="call_function", target=_GROUP):
            tensors, number, _ = node.args
            node.target, node.args = self._calls[number], (tensors,)

    def _select(self, layers: tuple[int, ...]) -> None:
        """Have the pass return the features of these layers; others are freed as soon as they are not needed."""
        graph = fx.Graph()
        logits, *features = graph.graph_copy(self._graph, val_map={})  # type: ignore[misc]
        graph.output((logits, *(features[layer] for layer in layers)))
        graph.eliminate_dead_code()
        self._run = fx.GraphModule(nn.Module(), graph).forward
        self._layers = layers


class _GroupCall:
    """A group, called as in the recorded pass.

    Args:
        group: the group.
        constants: of the call; see `FlatCall`.
        spec: of the call.
    """

    __name__ = "group_call"

    def __init__(self, group: LayerGroup, constants: tuple[Any, ...], spec: pytree.TreeSpec) -> None:
        self.group = group
        self.constants, self.spec = constants, spec

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of all layers."""
        return self.group.run(FlatCall(tuple(tensors), self.constants, self.spec))


class _Recorder:
    """Records a pass of a model, whose groups of layers are not looked into.

    Attributes:
        calls: of the groups, in order.
    """

    def __init__(self, model: PreTrainedModel, groups: Sequence[LayerGroup]) -> None:
        self._model = model
        self._groups = groups
        self._inputs: list[Tensor] = []
        self._remaining: list[Tensor] = []
        self.calls: list[_GroupCall] = []

    def export(self) -> ExportedProgram:
        """Return the pass, with features of all layers as further outputs."""
        rows, wanted, layout = _EXAMPLE_SIZES
        row = torch.arange(rows)[None]
        example = (row, row.clone(), torch.arange(wanted), torch.arange(layout, dtype=torch.int32))
        row_sizes, sizes = {0: Dim.STATIC, 1: Dim.AUTO}, {0: Dim.AUTO}
        for group in self._groups:
            set_call(group.layers[0], partial(self._run, group))
            for layer in group.layers[1:]:
                set_call(layer, self._next)
        try:
            shapes = (row_sizes, row_sizes, sizes, sizes)
            return torch.export.export(
                _Function(self._model, self.outputs), example, dynamic_shapes=(shapes,), strict=False
            )
        finally:
            for group in self._groups:
                group.attach()

    def outputs(self, token_ids: Tensor, positions: Tensor, wanted: Tensor, layout: Tensor) -> list[Tensor]:
        """Return the logits, the inputs of all layers, and the normalised input of the output layer."""
        states: list[Tensor] = []
        hook = self._model.base_model.register_forward_hook(lambda *call: states.append(call[2].last_hidden_state))
        try:
            output = self._model(
                input_ids=token_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=wanted,
                outrider_pass=NativePass(layout),
            )
        finally:
            hook.remove()
        return [output.logits[0], *self._inputs, *states]

    def _run(self, group: LayerGroup, *arguments: Any, **keywords: Any) -> Tensor:
        call = FlatCall.of(arguments, keywords)
        outputs: list[Tensor] = _GROUP(list(call.tensors), len(self.calls), len(group.layers))
        self.calls.append(_GroupCall(group, *_like_last(self.calls, call.constants, call.spec)))
        self._inputs.extend((call.tensors[0], *outputs[:-1]))
        self._remaining = outputs[::-1]
        return self._remaining.pop()

    def _next(self, *_: Any, **__: Any) -> Tensor:
        return self._remaining.pop()


class _Function(nn.Module):
    """A function of tensors and of a model's weights."""

    def __init__(self, model: nn.Module, function: Callable[..., list[Tensor]]) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Return what the function does."""
        return self._function(*tensors)


def _like_last(
    calls: Sequence[_GroupCall], constants: tuple[Any, ...], spec: pytree.TreeSpec
) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
    """Return equal constants as the last call's own: where they are the same objects, code is searched for once."""
    last = calls[-1] if calls else None
    is_alike = last is not None and (constants, spec) == (last.constants, last.spec)
    return (last.constants, last.spec) if last is not None and is_alike else (constants, spec)


def _check_sizes(exported: ExportedProgram) -> None:
    """Raise `RuntimeError` if the pass was recorded for some sizes only."""
    # What `exported.module()` would check at each call.
    if guards := exported._guards_code:
        raise RuntimeError(f"it depends on its sizes: {'; '.join(guards)}")


def _take_weights(exported: ExportedProgram) -> tuple[dict[str, Tensor], bool]:
    """Return the tensors that the pass reads, and whether all are the model's parameters and buffers.

    Inputs and checks that the pass does not need are removed.
    """
    signature, graph = exported.graph_signature, exported.graph
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise RuntimeError("the pass changes tensors of the model")
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    weights: dict[str, Tensor] = {}
    are_named = True
    for node, spec in zip(graph.find_nodes(op="placeholder"), signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            continue
        if not node.users:
            graph.erase_node(node)
            continue
        held = exported.constants if spec.target in exported.constants else exported.state_dict
        weights[str(spec.target)] = held[spec.target]
        are_named = are_named and spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
    return weights, are_named
