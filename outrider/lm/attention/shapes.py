"""A pass without computation that records a model's attention layers and the shapes of their keys and values."""

from dataclasses import dataclass, field

import torch

from outrider.lm.kv_storage import KVStorage, LayerShape


@dataclass(slots=True)
class ShapePass:
    """A pass that records the attention layers in the order in which they run; every output is zero."""

    modules: list[torch.nn.Module] = field(default_factory=list)
    shapes: list[LayerShape] = field(default_factory=list)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Record the layer; arguments as of `_attend`."""
        self.modules.append(module)
        self.shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def attach(self, storage: KVStorage, variant: int) -> None:
        """Assign every layer the keys and values that it reads and writes, and the variant of the native operator."""
        for index, module in enumerate(self.modules):
            # As attributes instead of a layer number: torch.compile then compiles one layer for all.
            module.kv_keys, module.kv_values = storage.layer(index)
            module.kv_variant = variant  # type: ignore[assignment]
