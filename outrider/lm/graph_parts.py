"""Parts of a recorded pass that are compiled: what comes before its layers, and what comes after them."""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from outrider.lm.compiled_function import Run, compile_function


def compile_ends(graph: fx.Graph, is_between: Callable[[fx.Node], bool]) -> None:
    """Replace what a graph runs before its first and after its last node of a kind by one compiled call each.

    Args:
        graph: of operators and functions; changed in place.
        is_between: whether a node is of that kind; there is at least one.

    Raises:
        RuntimeError: a part cannot be compiled; the graph is as it was.
    """
    nodes = list(graph.nodes)
    places = [place for place, node in enumerate(nodes) if is_between(node)]
    first, last = places[0], places[-1]
    parts = [[node for node in part if _is_run(node)] for part in (nodes[:first], nodes[last + 1 :])]
    made = [(part, _compiled(part)) for part in parts if part]
    for part, (call, inputs, outputs) in made:
        # Outputs of a list, which are not of the part, may lie between its nodes.
        with graph.inserting_after(part[-1]):
            node = graph.call_function(call, tuple(inputs))
        with graph.inserting_after(node):
            for index, output in enumerate(outputs):
                output.replace_all_uses_with(graph.call_function(operator.getitem, (node, index)))
        for old in reversed(part):
            graph.erase_node(old)


class CompiledPart:
    """A compiled part.

    Attributes:
        run: its function.
    """

    __name__ = "compiled_part"

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the outputs."""
        return self.run(*tensors)


def _is_run(node: fx.Node) -> bool:
    """Whether a node computes something; items of a group's outputs are only taken."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def _compiled(part: Sequence[fx.Node]) -> tuple[CompiledPart, list[fx.Node], list[fx.Node]]:
    """Return the compiled part, its inputs, and those of its nodes that are used elsewhere."""
    own = set(part)
    inputs = list(dict.fromkeys(node for member in part for node in member.all_input_nodes if node not in own))
    outputs = [node for node in part if any(user not in own for user in node.users)]
    if not all(isinstance(node.meta["val"], Tensor) for node in (*inputs, *outputs)):
        raise RuntimeError("a part of the pass takes or makes numbers")
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in part:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    examples = [node.meta["val"] for node in inputs]
    try:
        run = compile_function(fx.GraphModule(nn.Module(), graph), examples)
    except Exception as error:
        raise RuntimeError(f"a part of the pass cannot be compiled: {error}") from error
    return CompiledPart(run), inputs, outputs
