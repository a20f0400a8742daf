"""Whether the random words of dropout look random: shares, independence along each axis, bytes, runs, and bit flips.

All draws have fixed seeds. A random sequence fails each bound about once in a million draws. The tests use nothing of
Philox except the places of its 16 bytes.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from generated._runtime.core.checks import keep_numbers
from generated._runtime.torch.philox import dropout_words, philox4x32

CPU = torch.device("cpu")
SHAPE = (4, 4, 256, 256)
SIGMAS = 5.0


@cache
def words(seed: int) -> Tensor:
    return dropout_words(seed, SHAPE, CPU)


def centred(seed: int, dropout_p: float) -> Tensor:
    """Which of a million pairs are dropped, with mean 0 and variance 1."""
    threshold, _ = keep_numbers(dropout_p)
    return ((words(seed) < threshold).double() - dropout_p) / math.sqrt(dropout_p * (1 - dropout_p))


def check_mean(products: Tensor, what: object) -> None:
    """Check that the mean of numbers of variance 1 is close to 0."""
    assert abs(products.mean()) <= SIGMAS / math.sqrt(products.numel()), what


def check_chi_squared(counts: Tensor, expected: Tensor | float, what: object = None) -> None:
    """Check that counts differ from expected counts neither more nor less than by chance."""
    found = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.numel() - 1
    # Wilson and Hilferty, 1931: the cube root of chi-squared over its degrees of freedom is nearly normal.
    spread = 2 / (9 * freedom)
    assert abs((found / freedom) ** (1 / 3) - (1 - spread)) <= SIGMAS * math.sqrt(spread), (what, found, freedom)


RATES = pytest.mark.parametrize("dropout_p", [0.002, 0.1, 0.5, 0.9])
"""The first rate is half of the smallest step of a byte, and the second is no multiple of that step."""


@RATES
def test_the_share_of_dropped_pairs(dropout_p: float) -> None:
    dropped = centred(11, dropout_p)
    check_mean(dropped, "all")
    # The largest of 4096 means over rows, and over keys.
    for axis in (2, 3):
        means = dropped.mean(axis) * math.sqrt(dropped.shape[axis])
        if dropout_p >= 0.1:
            assert means.abs().max() <= 6.0
        assert abs(means.square().mean() - 1) <= SIGMAS * math.sqrt(2.5 / means.numel() * (1 + 1 / 256 / dropout_p))


@RATES
def test_pairs_at_a_distance_are_independent(dropout_p: float) -> None:
    dropped = centred(11, dropout_p)
    for axis, steps in ((0, (1, 2)), (1, (1, 2)), (2, (1, 2, 4, 7, 8, 16, 64)), (3, (1, 2, 7, 8, 9, 16, 17, 32, 64))):
        for step in steps:
            count = dropped.shape[axis] - step
            check_mean(dropped.narrow(axis, 0, count) * dropped.narrow(axis, step, count), (axis, step))
    check_mean((dropped * dropped.mT)[..., torch.ones(256, 256).tril(-1).bool()], "row and key exchanged")
    check_mean(dropped[..., :-8, :-8] * dropped[..., 8:, 8:], "both 8 further")


@RATES
def test_seeds_are_independent(dropout_p: float) -> None:
    for seed in (12, 11 + 2**32, 11 + 2**62):
        check_mean(centred(11, dropout_p) * centred(seed, dropout_p), seed)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_pairs_of_one_counter_are_independent(dropout_p: float) -> None:
    """Every two of the 16 pairs, and the number of the 16 that are dropped together."""
    dropped = centred(5, dropout_p).view(16, 16, 2, 8, 8, 2, 2, 4, 2)
    groups = dropped.permute(0, 1, 3, 4, 7, 2, 5, 6, 8).reshape(-1, 16)
    correlations = groups.T @ groups / groups.shape[0]
    largest = (correlations - torch.eye(16)).triu(1).abs().max()
    assert largest <= 5.5 / math.sqrt(groups.shape[0])
    counts = torch.bincount((groups > 0).sum(1), minlength=17).double()
    expected = torch.tensor([math.comb(16, n) * dropout_p**n * (1 - dropout_p) ** (16 - n) for n in range(17)])
    expected = expected.double() * groups.shape[0]
    often = expected >= 20
    check_chi_squared(counts[often], expected[often] * counts[often].sum() / expected[often].sum())


def test_bytes_are_uniform_alone_and_beside_their_neighbours() -> None:
    upper = words(7) >> 24
    check_chi_squared(torch.bincount(upper.flatten(), minlength=256).double(), upper.numel() / 256)
    for axis, step in ((3, 1), (3, 2), (3, 8), (3, 16), (2, 1), (2, 8), (1, 1), (0, 1)):
        count = upper.shape[axis] - step
        pairs = upper.narrow(axis, 0, count) * 256 + upper.narrow(axis, step, count)
        found = torch.bincount(pairs.flatten(), minlength=65536).double()
        check_chi_squared(found, pairs.numel() / 65536, (axis, step))


def test_the_shared_bytes_are_uniform_beside_each_own_byte() -> None:
    """This makes the drop probability exact for a threshold between two bytes."""
    pairs = (words(7) >> 16).view(16, 16, 2, 8, 8, 2, 2, 4, 2).permute(2, 5, 6, 8, 0, 1, 3, 4, 7).reshape(16, -1)
    for i, each in enumerate(pairs):
        check_chi_squared(torch.bincount(each, minlength=65536).double(), each.numel() / 65536, i)


@pytest.mark.parametrize("axis", [2, 3])
def test_runs_are_as_many_as_of_coins(axis: int) -> None:
    """Wald and Wolfowitz: a run ends where a pair is dropped and the next is not, or the other way round."""
    dropped = centred(3, 0.5) > 0
    ends = dropped.narrow(axis, 1, 255) != dropped.narrow(axis, 0, 255)
    check_mean(2 * ends.double() - 1, "all")
    by_line = ends.sum(axis).double()
    assert abs(by_line.var() - 255 / 4) <= SIGMAS * 255 / 4 * math.sqrt(2 / by_line.numel())


def test_no_frequency_stands_out() -> None:
    """In the Fourier transform of the masks, the power of each of a million waves is exponentially distributed."""
    power = torch.fft.fft2(centred(9, 0.5)).abs().square()[..., 1:128, 1:] / 256**2
    assert power.max() <= math.log(power.numel()) + 14
    check_chi_squared(torch.histc((-power).exp(), 64, 0, 1).double(), power.numel() / 64)


def test_each_bit_of_seed_and_counter_flips_half_of_the_bits() -> None:
    """With six rounds of Philox the words fail this test, with five also most of the tests above."""
    count, seed = 512, 0x0123456789ABCDEF
    draw = torch.Generator().manual_seed(1)
    key, row, head = (torch.randint(0, 2**32, (count,), generator=draw) for _ in range(3))
    zero = torch.zeros(count, dtype=torch.int64)
    before = torch.stack(philox4x32(seed, key, row, head, zero))
    flips = [(seed ^ 1 << bit, key, row, head) for bit in range(63)]
    for flipped in (1 << bit for bit in range(32)):
        flips += [(seed, key ^ flipped, row, head), (seed, key, row ^ flipped, head), (seed, key, row, head ^ flipped)]
    for number, changed in enumerate(flips):
        differ = before ^ torch.stack(philox4x32(*changed, zero))
        bits = (differ[..., None] >> torch.arange(32) & 1).double()
        check_mean(2 * bits - 1, number)
        # The same for each of the 128 bits alone.
        assert ((2 * bits - 1).mean(1) * math.sqrt(count)).abs().max() <= 6.0, number
