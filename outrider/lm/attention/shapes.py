"""A pass that only looks: which attention layers a model has, and what each caches of a position."""

from dataclasses import dataclass, field

import torch

from outrider.lm.kv_storage import KVStorage, LayerShape


@dataclass(slots=True)
class ShapePass:
    """Collects the layers in the order in which they run; every output is zero."""

    modules: list[torch.nn.Module] = field(default_factory=list)
    shapes: list[LayerShape] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

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
        """Notes the layer; see `_attend`."""
        self.modules.append(module)
        self.groups.append(query.shape[1] // key.shape[1])
        self.shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def attach(self, storage: KVStorage) -> None:
        """Gives every layer the keys and values it reads and writes."""
        for index, module in enumerate(self.modules):
            # By attribute, not by number: a compiler that sees no number compiles one layer for all.
            module.kv_keys, module.kv_values = storage.layer(index)
            # To the compiler a shape may be a symbol, and these must not be.
            module.kv_group = self.groups[index]  # type: ignore[assignment]
            module.kv_page_len = storage.page_len  # type: ignore[assignment]
