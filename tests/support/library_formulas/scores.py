"""Temperatures, what stands instead of the softmax, stacks and exercises."""

from __future__ import annotations

import math

import torch

from tests.support.library_formulas.draws import positive
from tests.support.library_formulas.formula import BATCH, HEADS, POSITIONS, Grid, Result, capped, variant

# --------------------------------------------------------------------------------------------------------- temperatures


@variant(temperature=positive(HEADS), gain=positive())
def temperature(g: Grid) -> Result:
    return None, torch.einsum("bhij,h->bhij", g.s, g.own["temperature"]) * g.own["gain"]


@variant(q_offset=25, temperature=positive(BATCH, HEADS, POSITIONS))
def key_temperature(g: Grid) -> Result:
    return g.j <= g.i, torch.einsum("bhij,bhj->bhij", g.s, g.own["temperature"][:, :, : g.s.shape[3]])


@variant()
def log_length(g: Grid) -> Result:
    seen = (g.j <= g.i).sum(-1, keepdim=True).double()
    return g.j <= g.i, g.s * seen.log()


@variant()
def log_n(g: Grid) -> Result:
    return None, g.s * math.log(len(g.j), 512)


@variant(strength=positive(HEADS))
def scalable_softmax(g: Grid) -> Result:
    seen = (g.j <= g.i).sum(-1, keepdim=True).double()
    return g.j <= g.i, g.s * g.heads("strength") * seen.log()


# ----------------------------------------------------------------------------------------------- instead of the softmax


@variant(bias=-3.5)
def sigmoid_attention(g: Grid) -> Result:
    return None, torch.nn.functional.logsigmoid(g.s + g.own["bias"])


@variant()
def relu_attention(g: Grid) -> Result:
    return None, torch.where(g.s > 0, g.s.clamp(min=1e-300).log(), -10000.0)


@variant(size=20, q_offset=25, g=lambda: -0.2 * torch.rand(BATCH, POSITIONS, HEADS))
def forgetting_window(g: Grid) -> Result:
    log_decay = g.own["g"].transpose(1, 2)  # [B, H, P]
    positions = torch.arange(POSITIONS, device=g.s.device)
    after_key, up_to_query = positions > g.j[:, None], positions <= g.i  # [Skv, P], [Sq, P]
    forgotten = torch.einsum("bhp,ip,jp->bhij", log_decay, up_to_query.double(), after_key.double())
    distance = g.i - g.j
    return (distance >= 0) & (distance < g.own["size"]), g.s + forgotten


# ------------------------------------------------------------------------------------------------- stacks and exercises


@variant(size=20, q_offset=25, slope=positive(HEADS))
def mixed_stack(g: Grid) -> Result:
    distance = g.i - g.j
    return (distance >= 0) & (distance < g.own["size"]), capped(g.s, 30) - g.heads("slope") * distance


@variant(q_offset=25)
def checkerboard(g: Grid) -> Result:
    return None, g.s * torch.tensor([2.0, 0.5], device=g.s.device)[g.each(lambda i, j: abs(i - j) % 2)]


@variant()
def squared(g: Grid) -> Result:
    return None, g.s.square()


@variant()
def trig(g: Grid) -> Result:
    return None, g.s.cos().sin() + g.b.double().tan()


@variant()
def silu_score(g: Grid) -> Result:
    return None, g.s / (1 + (-g.s).exp())


@variant(q_offset=25, positive=True)
def reciprocal(g: Grid) -> Result:
    return g.j <= g.i, g.s.reciprocal()


@variant(q_offset=25)
def log_or_score(g: Grid) -> Result:
    return g.j <= g.i, torch.where(g.s > 0, g.s.clamp(min=1e-300).log(), g.s)
