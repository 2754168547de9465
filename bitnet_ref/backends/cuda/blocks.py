"""The two blocks of a layer as a few kernel launches on plain arrays, bit for bit what the composed ops give.

    attention:     [norm, quantise, q k v]  [RoPE, append (and attention while decoding)]  [norm, quantise, o, add]
    feed-forward:  [norm, quantise, gate and up, gated]  [norm, quantise, down, add]

For one token each product norms and quantises its own row; for several tokens one launch of `rows.cu` comes before it.
The products of one input are one launch over a stack of weights. The epilogue of o and down adds the residual stream.
"""

from __future__ import annotations

from .device import DeviceArray
from .rows import GATES, Norm, linear_of_row, quantize, takes_row
from .stacks import Stack, split
from .ternary import TernaryKernels, TiledWeight
from .workspace import Workspace


class FusedLinears:
    """Ternary products with the norm before and the residual stream after them. Every array is on the device."""

    def __init__(self, ws: Workspace, ternary: TernaryKernels) -> None:
        self._ws, self._ternary = ws, ternary

    def norm_linears(self, x: DeviceArray, norm: Norm, stack: Stack) -> tuple[DeviceArray, ...]:
        """The linears of a stack, of normed x (N, K).   -> (N, out) each"""
        if takes_row(x, stack.whole):
            return split(linear_of_row(self._ws, x, stack.whole, norm), 1, stack.parts)
        x_q, scale = quantize(self._ws, x, norm)
        return split(self._ternary.linear(x_q, scale, stack.whole), len(x), stack.parts)

    def norm_linear_add(self, x: DeviceArray, norm: Norm | None, w: TiledWeight, residual: DeviceArray) -> DeviceArray:
        """residual (N, out) + the linear of x (N, K), which is normed first if there is a norm.   -> (N, out)"""
        if takes_row(x, w):
            return linear_of_row(self._ws, x, w, norm, residual=residual)
        return self._ternary.linear(*quantize(self._ws, x, norm), w, residual=residual)

    def feed_forward(
        self, x: DeviceArray, norm: Norm, gate_up: Stack, activation: str, sub_norm: Norm | None, down: TiledWeight
    ) -> DeviceArray:
        """x + down(norm(act(gate) * up)), where gate and up are linears of normed x.   (N, D) -> (N, D)"""
        if takes_row(x, gate_up.whole, gated=True):
            h = linear_of_row(self._ws, x, gate_up.whole, norm, gate=GATES[activation])  # (1, F)
            return self.norm_linear_add(h, sub_norm, down, x)
        gate, up = self.norm_linears(x, norm, gate_up)  # (N, F) each
        quantized = quantize(self._ws, gate, sub_norm, up=up, gate=GATES[activation])
        return self._ternary.linear(*quantized, down, residual=x)
