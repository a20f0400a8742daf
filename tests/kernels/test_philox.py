"""The random words of dropout: equal to the published Philox and to Triton's, and their places in a mask."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from generated._runtime.core.checks import keep_numbers
from generated._runtime.torch.philox import dropout, dropout_words, philox4x32
from tests.support.cases import DEVICE

CPU = torch.device("cpu")


def word(x: int) -> Tensor:
    return torch.tensor(x, dtype=torch.int64)


# Salmon et al., Random123: kat_vectors, the lines of philox4x32 with 7 rounds.
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN)
def test_known_answers(key: tuple[int, int], counter: tuple[int, ...], words: tuple[int, ...]) -> None:
    seed = key[1] << 32 | key[0]
    seed -= 2**64 if seed >= 2**63 else 0
    c0, c1, c2, c3 = (word(c) for c in counter)
    assert tuple(int(x) for x in philox4x32(seed, c0, c1, c2, c3)) == words


@triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator]  # Triton has no types
def _philox_kernel(words_ptr, seed: tl.uint64, c1, c2, c3, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offs = tl.arange(0, BLOCK)
    w0, w1, w2, w3 = tl.philox(seed, offs, c1, c2, c3, 7)
    tl.store(words_ptr + offs, w0.to(tl.int64))
    tl.store(words_ptr + BLOCK + offs, w1.to(tl.int64))
    tl.store(words_ptr + 2 * BLOCK + offs, w2.to(tl.int64))
    tl.store(words_ptr + 3 * BLOCK + offs, w3.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 7, 2**63 - 1])
def test_the_words_are_those_of_triton(seed: int) -> None:
    got = torch.empty((4, 64), dtype=torch.int64, device=DEVICE)
    _philox_kernel[(1,)](got, seed, 5, 2**31 - 1, 0, BLOCK=64)
    want = philox4x32(seed, torch.arange(64), word(5), word(2**31 - 1), word(0))
    assert torch.equal(got.cpu(), torch.stack(want))


def test_a_word_for_each_pair() -> None:
    """A counter gives 16 bytes, for 16 pairs. The other bits of a pair's row and key are in the counter."""
    words = dropout_words(3, (2, 3, 40, 50), CPU)
    assert words.shape == (2, 3, 40, 50)
    for b, h, row, key in ((0, 0, 0, 0), (0, 2, 7, 8), (1, 0, 8, 7), (1, 1, 31, 41), (1, 2, 39, 49), (0, 1, 12, 22)):
        counter = (row // 16 * 8 + row % 8, key // 32 * 4 + key // 2 % 4)
        four = [int(x) for x in philox4x32(3, word(counter[1]), word(counter[0]), word(b * 3 + h), word(0))]
        own = four[key // 16 % 2 * 2 + row // 8 % 2].to_bytes(4, "little")[key % 2 * 2 + key // 8 % 2]
        shared = (four[0] ^ four[1] ^ four[2] ^ four[3]).to_bytes(4, "little")[1:]
        assert int(words[b, h, row, key]) == int.from_bytes([*shared, own], "little")


def test_a_longer_call_has_the_same_words() -> None:
    words = dropout_words(9, (2, 3, 64, 70), CPU)
    assert torch.equal(dropout_words(9, (1, 3, 33, 17), CPU), words[:1, :, :33, :17])
    # One offset for all batch rows, as a number and as a tensor.
    for offset in (32, torch.full((1, 1, 1, 1), 32), torch.full((2, 1, 1, 1), 32)):
        assert torch.equal(dropout_words(9, (2, 3, 32, 70), CPU, row_offset=offset), words[:, :, 32:])


def test_dropout_scales_kept_probabilities() -> None:
    probs = torch.rand(1, 2, 128, 128, dtype=torch.float64)
    got = dropout(probs, 0.25, 5)
    kept = dropout_words(5, probs.shape, CPU) >= 2**30
    torch.testing.assert_close(got, torch.where(kept, probs / 0.75, 0.0), rtol=1e-15, atol=0)
    assert 0.74 < kept.double().mean() < 0.76


@pytest.mark.parametrize(
    ("dropout_p", "threshold"),
    [(0.0, 0), (2**-34, 0), (2**-32, 1), (0.1, 429496730), (0.5, 2**31), (1 - 2**-32, 2**32 - 1)],
)
def test_keep_numbers(dropout_p: float, threshold: int) -> None:
    assert keep_numbers(dropout_p) == (threshold, 1 / (1 - threshold / 2**32))


def test_no_dropout_p_below_one_drops_all() -> None:
    assert keep_numbers(1 - 2**-53) == (2**32 - 1, 2.0**32)
