"""A pass of an EAGLE-3 head in parts, between which sessions attend and trees grow; compiled where that is possible.

A head is so small that what lies between its products takes as long as they do.
"""

import logging
import warnings
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.lm.compilation import can_compile, compile_layers, uncompile_layers
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.packed_linear import NativeLinear, pack_linears

_LOG: Final = logging.getLogger(__name__)
_LEAST_ROWS: Final = 2
"""One row would be compiled by itself."""


class _Projection(nn.Module):
    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.layer = head.midlayer

    def forward(
        self, embeddings: Tensor, hidden: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.layer.project(embeddings, hidden, (cosine, sine))


class _Rest(nn.Module):
    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.layer = head.midlayer

    def forward(self, attended: Tensor, residual: Tensor) -> Tensor:
        return self.layer.finish(attended, residual)


class _Output(nn.Module):
    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.norm = head.norm
        self.lm_head = head.lm_head

    def forward(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        states = self.norm(outputs)
        return states, self.lm_head(states)


class HeadPasses:
    """The parts of a head's pass; rows are [N, ...]. See the module.

    Args:
        head: in bfloat16, on its device; its linear layers are packed.
        compiles: whether to compile them, where there is a compiler and the native product.
    """

    def __init__(self, head: Eagle3Head, *, compiles: bool) -> None:
        device = head.norm.weight.device
        compiles = compiles and can_compile(device)
        packed = pack_linears(head, joins=compiles)
        self._head = head
        self._projection, self._rest, self._output = _Projection(head), _Rest(head), _Output(head)
        if compiles and packed == NativeLinear.kind:
            self._compile()

    def project(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rotated queries [heads, N, dim], rotated keys and values [kv_heads, N, dim], and the residual [N, H].

        Args:
            embeddings: of the rows' tokens: [N, H].
            hidden: the output of `fc` for a column, the output of the parent for a drafted token: [N, H].
            positions: for the rotary embedding, int64 [N].
        """
        num = len(hidden)
        embeddings, hidden = _filled(embeddings), _filled(hidden)
        cosine, sine = self._head.rotary(hidden[None], _filled(positions)[None])
        query, key, value, residual = self._projection(embeddings[None], hidden[None], cosine, sine)
        return query[0, :, :num], key[0, :, :num], value[0, :, :num], residual[0, :num]

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the outputs of rows, [N, H], given what they attended to, [N, heads * dim]."""
        outputs: Tensor = self._rest(_filled(attended)[None], _filled(residual)[None])
        return outputs[0, : len(attended)]

    def logits(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised outputs, [N, H], and the logits of the draft's tokens, [N, D]."""
        states, logits = self._output(_filled(outputs))
        return states[: len(outputs)], logits[: len(outputs)]

    def _compile(self) -> None:
        parts = [self._projection, self._rest, self._output]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler, about its own code
                for part in parts:
                    compile_layers([part])
                self._run_once()
        except Exception as error:
            _LOG.warning("the head runs uncompiled: %s", str(error).strip().splitlines()[0])
            uncompile_layers(parts)

    @torch.no_grad()
    def _run_once(self) -> None:
        layer = self._head.config.layer
        weight = self._head.norm.weight
        rows = torch.zeros(_LEAST_ROWS, layer.hidden_size, dtype=weight.dtype, device=weight.device)
        query, _, _, residual = self.project(rows, rows, torch.arange(len(rows)))
        self.logits(self.finish(query.transpose(0, 1).flatten(1), residual))


def _filled(rows: Tensor) -> Tensor:
    """Return rows, [N, ...], and others behind them where there are fewer than are compiled for."""
    missing = _LEAST_ROWS - len(rows)
    return rows if missing <= 0 else functional.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, missing))
