"""The gated delta rule in plain torch: token by token, which defines it, and in chunks of 64.

Chosen for: never alone; the references use it.

    beta = sigmoid(b)      g = -exp(A_log) softplus(a + dt_bias)      q, k <- l2norm;  q /= sqrt(dk)
    S <- exp(g) S          d = beta (v - S^T k)          S <- S + k d^T          o = S^T q

Source: Yang et al. 2024, "Gated Delta Networks"; the chunked form is its UT transform. Within a
chunk, with G the running sum of g and S the state before it, the d of all tokens solve

    (I + L) d = beta (v - e^G k S)       L_ij = beta_i e^(G_i - G_j) k_i.k_j,  j < i
    o = e^G q S + (e^(G_i - G_j) q_i.k_j) d          S <- e^G_C S + (e^(G_C - G) k)^T d

beta is rounded to the model dtype; all else is float32, or float64 for float64 inputs.
Traps: decay comes before retrieval, the read after the write. a and b have one shape: a is the
decay, b is beta. K-head j serves the value heads j*r to j*r + r-1 (r = V/H): repeat_interleave, not
tiling.

Shape letters: T tokens, H key heads, V value heads, k key size, v value size, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.launch import widen

CHUNK = 64
LONG = 4 * CHUNK  # a prompt whose chunks are worth a compiled loop
EPS = 1e-6


class Rule(NamedTuple):
    """A layer's own weights, as conv1d_step, gated_delta_step and gated_rmsnorm take them.

    conv_C1K [C, 1, K], A_log and dt_bias [V], norm_v [v]; heads and sizes are (H, k) and (V, v)
    """

    conv_C1K: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_v: Tensor
    keys: tuple[int, int]
    values: tuple[int, int]
    eps: float

    def split(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the views q, k [T, H, k] and v [T, V, v]."""
        key_width, value_width = self.keys[0] * self.keys[1], self.values[0] * self.values[1]
        q, k, v = torch.split(qkv_TC, [key_width, key_width, value_width], -1)
        return q.view(-1, *self.keys), k.view(-1, *self.keys), v.view(-1, *self.values)


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g, beta): the logarithm of the decay and the learning rate, both in float32."""
    g = -widen(A_log).exp() * F.softplus(widen(a) + dt_bias)
    return g, widen(b.sigmoid())


def heads_first(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (q, k, v, g, beta) as [V, T, ...] in float32: normalised, scaled, heads repeated."""
    g, beta = gates(a, b, A_log, dt_bias)
    repeat = v.shape[1] // k.shape[1]

    def unit(x: Tensor) -> Tensor:
        x = widen(x)
        x = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)
        return x.repeat_interleave(repeat, 1).transpose(0, 1)

    return unit(q) * q.shape[-1] ** -0.5, unit(k), widen(v).transpose(0, 1), g.T, beta.T


def recurrence(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (o, final state) token by token from the inputs that `heads_first` made.

    S [V, k, v]; q, k [V, T, k]; v, o [V, T, v]; g, beta [V, T]
    """
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        S = S * g[:, t, None, None].exp()
        retrieved = (S * k[:, t, :, None]).sum(1)
        d = (v[:, t] - retrieved) * beta[:, t, None]
        S = S + k[:, t, :, None] * d[:, None]
        o[:, t] = (S * q[:, t, :, None]).sum(1)
    return o, S


def chunks(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `recurrence` returns, 64 tokens at a time."""
    outputs, solve = [], _solver(v)
    for q_c, k_c, v_c, g_c, beta_c in zip(
        *(x.split(CHUNK, 1) for x in (q, k, v, g, beta)), strict=True
    ):
        o, S = _chunk(S, q_c, k_c, v_c, g_c.cumsum(1), beta_c[..., None], solve)
        outputs.append(o)
    return torch.cat(outputs, 1), S


def _solver(v: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what solves (I + L) d = right side for the chunks of a prompt."""
    if v.device.type == "cpu" and v.dtype == torch.float32 and v.shape[1] >= LONG:
        from runtime.kernels.delta_rule.forward import substitute

        return substitute
    return partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)


def _chunk(
    S: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    G: Tensor,
    beta: Tensor,
    solve: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    future = torch.ones(G.shape[1], G.shape[1], dtype=torch.bool, device=G.device).triu(1)
    decay = (G[:, :, None] - G[:, None]).masked_fill(future, -torch.inf).exp()
    since, until = G.exp()[..., None], (G[:, -1:] - G).exp()[..., None]
    L = beta * (k @ k.mT) * decay
    d = solve(L, (beta * (v - since * (k @ S))).contiguous())
    o = since * (q @ S) + ((q @ k.mT) * decay) @ d
    return o, S * since[:, -1:] + (k * until).mT @ d
