"""The graph of a compiled pass, for JSON: which groups and parts it calls, on what."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from outrider.lm.graph_parts import CompiledPart

Facts = list[list[Any]]
"""By node its kind, the number of its part or group or the place of its item, and the numbers of its arguments."""
_INPUT, _PART, _GROUP, _ITEM, _OUTPUT = "input", "part", "group", "item", "output"


def graph_facts(graph: fx.Graph, groups: Sequence[object]) -> tuple[Facts, list[CompiledPart]] | None:
    """Return a graph, and the parts that it calls; None where it calls something else.

    Args:
        graph: of a pass.
        groups: the calls of its groups, in order.
    """
    numbers: dict[fx.Node, int] = {}
    facts: Facts = []
    parts: list[CompiledPart] = []
    for node in graph.nodes:
        arguments = [numbers[argument] for argument in node.all_input_nodes]
        if node.op == "placeholder":
            facts.append([_INPUT, 0, []])
        elif node.op == "output":
            facts.append([_OUTPUT, 0, [numbers[argument] for argument in node.args[0]]])
        elif isinstance(node.target, CompiledPart):
            facts.append([_PART, len(parts), [numbers[argument] for argument in node.args]])
            parts.append(node.target)
        elif node.target in groups:
            facts.append([_GROUP, groups.index(node.target), [numbers[argument] for argument in node.args[0]]])
        elif node.target is operator.getitem:
            facts.append([_ITEM, node.args[1], arguments])
        else:
            return None
        numbers[node] = len(numbers)
    return facts, parts


def graph_of(facts: Facts, parts: Sequence[Callable[..., Any]], groups: Sequence[Callable[..., Any]]) -> fx.Graph:
    """Return the graph with these facts; see `graph_facts`."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for kind, number, places in facts:
        arguments = [nodes[place] for place in places]
        if kind == _INPUT:
            node = graph.placeholder(f"input_{len(nodes)}")
        elif kind == _PART:
            node = graph.call_function(CompiledPart(parts[number]), tuple(arguments))
        elif kind == _GROUP:
            node = graph.call_function(groups[number], (arguments,))
        elif kind == _ITEM:
            node = graph.call_function(operator.getitem, (*arguments, number))
        else:
            node = graph.output(arguments)
        nodes.append(node)
    return graph
