"""Facts about a variant that decide between the families of kernels and between their tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from codegen.analysis.band_widths import band_width
from codegen.analysis.call_modes import Mode
from codegen.analysis.mask_ranges import ONE
from codegen.analysis.schedule import Schedule
from codegen.arch.hopper import FAMILY
from codegen.arch.tile_rules import TileConfig
from codegen.ir import expr
from codegen.ir.expr import Level, Load, Op, Var
from codegen.plan.code.tree import Literal
from codegen.plan.hopper.tanh import exponentials
from codegen.plan.kernel_files import fuses_backward
from codegen.plan.kernels.variant_reads import reads_pairs, tile_runs
from codegen.plan.paged.hopper import has_hopper_forward
from codegen.plan.paged.latent import has_latent_kernel
from codegen.plan.variant import VariantPlan
from codegen.spec.model import Pass, Variant
from codegen.spec.symbols import symbolised


@dataclass(frozen=True, kw_only=True)
class VariantTraits:
    """One record per variant. The package holds it as `_runtime/kernels.py: TRAITS`; `_runtime/core/tiles.py` says
    what each field means."""

    score_is_scaled_product: bool
    products_add_terms: bool
    score_is_capped: bool
    score_is_cheap: bool
    score_is_overlapped: bool
    keys_start_at_zero: bool
    rows_are_alike: bool
    keys_are_runs: bool
    bands_are_bits: bool
    band_keys: int | None
    large_stages: int | None
    run_unit: int
    run_lengths: tuple[int | str, ...]
    fused_modes: tuple[str, ...]
    atomic_modes: tuple[str, ...]
    hopper_reads_pages: bool
    hopper_reads_latents: bool
    splits_gradients: bool
    takes_fp8: bool


def variant_traits(variant: Variant, plans: Mapping[Mode, VariantPlan]) -> VariantTraits:
    """The traits of a variant. `plans`: of its kernels in all modes."""
    dense, own = plans[Mode.DENSE], symbolised(variant)
    runs = tuple(length.name if isinstance(length, Var) else int(length.value) for length in tile_runs(own))
    return VariantTraits(
        score_is_scaled_product=score_is_scaled_product(dense),
        products_add_terms=products_add_terms(dense),
        score_is_capped=score_is_capped(dense),
        score_is_cheap=_score_is_cheap(dense),
        score_is_overlapped=_score_is_overlapped(dense),
        keys_start_at_zero=keys_start_at_zero(dense),
        rows_are_alike=rows_are_alike(dense),
        keys_are_runs=_keys_are_runs(dense),
        bands_are_bits=_bands_are_bits(dense),
        band_keys=_band_keys(dense),
        large_stages=large_stages(variant),
        run_unit=_run_unit(own, runs),
        run_lengths=runs,
        fused_modes=tuple(mode.value for mode, planned in plans.items() if fuses_backward(planned)),
        atomic_modes=tuple(mode.value for mode, planned in plans.items() if any(t.atomic for t in planned.terms)),
        hopper_reads_pages=has_hopper_forward(variant),
        hopper_reads_latents=has_latent_kernel(variant),
        splits_gradients=dense.hopper_split_keys is not None,
        takes_fp8=dense.hopper_fwd_fp8 is not None,
    )


def score_is_scaled_product(planned: VariantPlan) -> bool:
    """True if the score is the scaled product of query and key: no score expression, no dropout."""
    return planned.fwd.linear and not planned.variant.dropout


def products_add_terms(planned: VariantPlan) -> bool:
    """True if a score is the scaled product and a term of each key, which products of Hopper's forward add."""
    return planned.hopper_fwd_of_terms is not None


def score_is_capped(planned: VariantPlan) -> bool:
    """True if the score is a number times the tanh of a multiple of the product, and nothing else has a gradient."""
    full = planned.hopper_fwd.full
    own = planned.variant.dropout or planned.terms
    return full is not None and not own and exponentials(full.logit, Literal(0.0)) is not None


def _score_is_cheap(planned: VariantPlan) -> bool:
    """True if a score costs a few instructions: products add its terms, or its expression calls no function and reads
    nothing per key or pair, and it draws no random number. A log-decay counts as cheap: it reads one vector for each
    block of keys."""
    variant = planned.variant
    if products_add_terms(planned):
        return True
    nodes = expr.walk(variant.score) if variant.score is not None else ()
    expensive = (
        (isinstance(node, Op) and node.op in expr.FLOAT_FUNCTIONS)
        or (isinstance(node, Load) and expr.level(node) > Level.QUERY)
        for node in nodes
    )
    return not variant.dropout and not any(expensive)


def _score_is_overlapped(planned: VariantPlan) -> bool:
    """True if Hopper's forward computes a costly score beside its exponentials: a tanh as a polynomial, or a dropout's
    draws."""
    draws = planned.variant.dropout and planned.fwd.linear and not planned.variant.decay
    return bool(draws) or score_is_capped(planned)


def keys_start_at_zero(planned: VariantPlan) -> bool:
    """True if every query attends to one contiguous key range that starts at key 0, as with a causal mask.

    A program of Hopper's family works on one tile of rows at a time. The start and end of a short range cost it more
    than a portable program, which shares its multiprocessor with others.
    """
    bounds = planned.fwd.bounds
    return bounds is not None and bounds.begins_at_zero and not bounds.jumps and not bounds.lists


def rows_are_alike(planned: VariantPlan) -> bool:
    """True if all rows attend to the same keys, so that the mask cuts no tile."""
    bounds = planned.fwd.bounds
    return bounds is not None and not bounds.masked


def _keys_are_runs(planned: VariantPlan) -> bool:
    """True if a row attends to contiguous key ranges. A list of blocks describes other masks; it cuts most tiles."""
    bounds = planned.fwd.bounds
    return bounds is not None and not bounds.lists


def _bands_are_bits(planned: VariantPlan) -> bool:
    """True if a row's keys are a band that follows from distances alone, so that Hopper's forward masks it by the bits
    of a word."""
    partial = planned.hopper_fwd.partial
    width = band_width(planned.analysis, planned.variant.scalars)
    by_distance = planned.analysis.schedule is Schedule.CLOSED_FORM and width is not None
    return by_distance and partial is not None and partial.run is not None and partial.keep is None


def _band_keys(planned: VariantPlan) -> int | None:
    """The width of a row's band, with the examples of scalars that it depends on."""
    width = band_width(planned.analysis, planned.variant.scalars)
    if width is None:
        return None
    examples = {name: spec.example for name, spec in planned.variant.scalars.items()}
    total = width.get(ONE, 0)
    for scalar, factor in width.items():
        if isinstance(scalar, Var):
            example = examples[scalar.name]
            if example is None:
                return None
            total += factor * int(example)
    return total


def large_stages(variant: Variant) -> int | None:
    """Most stages of default tiles of 128 by 128 with more than 64 columns, if elements that are read for each pair
    need shared memory on their way to the layout of the products; None if nothing is read so."""
    return 2 if reads_pairs(variant) else None


def _run_unit(variant: Variant, runs: Sequence[int | str]) -> int:
    """The largest power of two that divides the lengths of runs, with the examples of scalars; 0 for no runs."""
    examples = (variant.scalars[length].example if isinstance(length, str) else length for length in runs)
    common = gcd(*(int(example or 0) for example in examples))
    return common & -common


# ------------------------------------------------------------------------------------------ tiles of Hopper's family


def hopper_forward_tile(head_dim: int) -> TileConfig:
    """The default tile of the forward."""
    is_wide = head_dim > max(FAMILY.forward_tiles)
    return FAMILY.wide_forward_tile if is_wide else FAMILY.forward_tiles[FAMILY.columns(head_dim)]


def hopper_long_forward_tile(planned: VariantPlan, head_dim: int) -> TileConfig | None:
    """The tile of the forward of long sequences, if it differs."""
    by_products = score_is_scaled_product(planned) or products_add_terms(planned)
    is_long = planned.mode is Mode.DENSE and by_products and keys_start_at_zero(planned)
    return FAMILY.long_forward_tile if is_long and head_dim <= min(FAMILY.forward_tiles) else None


def hopper_mixed_forward_tile(planned: VariantPlan) -> TileConfig:
    """The tile of the forward if q and k have 129 to 192 columns, and v at most 128. Terms of keys do not fit beside
    the larger one."""
    return FAMILY.forward_tiles[256] if products_add_terms(planned) else FAMILY.mixed_forward_tile


def hopper_backward_tile(planned: VariantPlan, head_dim: int) -> TileConfig | None:
    """The tile of dk and dv in the backward; None if the family has none for this variant and head_dim."""
    if not FAMILY.serves_head_dim(head_dim):
        return None if planned.hopper_split_keys is None else FAMILY.split_tiles[Pass.DKDV]
    tile = FAMILY.backward_tiles[FAMILY.columns(head_dim)]
    if score_is_scaled_product(planned) or (score_is_capped(planned) and planned.mode is Mode.DENSE):
        return tile
    return replace(tile, block_m=min(tile.block_m, FAMILY.scored_rows))
