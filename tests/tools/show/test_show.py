"""`show`: what it prints for a variant."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import numpy as np
import pytest

from codegen.cli.main import main
from codegen.inspect.block_status import Status, block_diagonal, pairs
from codegen.inspect.call import make_packed_calls
from codegen.inspect.show import coarsened
from codegen.load.spec_file import load
from tests.support.shown import shown

CAUSAL = """\
causal: A query attends to itself and to what came before (Vaswani et al., 2017, section 3.2.3).

mask      q_idx >= kv_idx
score     score
tensors   -
scalars   -
extras    -
schedule  closed_form

512 queries (down) by 512 keys (across), blocks of 64 by 64, b = 0, h = 0

▒▒..............
██▒▒............
████▒▒..........
██████▒▒........
████████▒▒......
██████████▒▒....
████████████▒▒..
██████████████▒▒

. empty  ▒ partial  █ full

                      empty   partial      full
evaluated             43.8%     12.5%     43.8%
by block analysis     43.8%     12.5%     43.8%

pairs kept        50.1%
work skipped      43.8%
"""

WINDOW = """\
window: Causal with a window of `size` keys, the query's own included (Mistral 7B, arXiv:2310.06825).

mask      q_idx >= kv_idx and q_idx - kv_idx < size
score     score
tensors   -
scalars   size: int = 100
extras    -
schedule  closed_form

256 queries (down, from position 256 on) by 512 keys (across), blocks of 64 by 32, b = 1, h = 3

........++++++##++++............
............++++++##++++........
................++++++##++++....
....................++++++##++++

. empty  + partial  # full

                      empty   partial      full
evaluated             62.5%     31.2%      6.2%
by block analysis     62.5%     31.2%      6.2%

pairs kept        19.5%
work skipped      62.5%
"""

GEMMA2_LOCAL = """\
mask      q_idx >= kv_idx and q_idx - kv_idx < 4096
score     50.0 * tanh(0.02 * score)
tensors   -
scalars   -
extras    -
schedule  closed_form

8192 queries (down) by 8192 keys (across), blocks of 256 by 256, b = 0, h = 0

▒▒..............
██▒▒............
████▒▒..........
██████▒▒........
▒▒██████▒▒......
..▒▒██████▒▒....
....▒▒██████▒▒..
......▒▒██████▒▒

. empty  ▒ partial  █ full  (each for 4 by 4 blocks)

                      empty   partial      full
"""

PACKED = """\
causal: A query attends to itself and to what came before (Vaswani et al., 2017, section 3.2.3).

mask      q_idx >= kv_idx
score     score
tensors   -
scalars   -
extras    -
schedule  closed_form

17 queries (down) by 17 keys (across), pair by pair, h = 0
sequences of 5, 3, 9; b is their number, on the margins; positions restart in each

  0         1     2
0 ██................................
  ████..............................
  ██████............................
  ████████..........................
  ██████████........................
1 ..........██......................
  ..........████....................
  ..........██████..................
2 ................██................
  ................████..............
  ................██████............
  ................████████..........
  ................██████████........
  ................████████████......
  ................██████████████....
  ................████████████████..
  ................██████████████████

. empty  ▒ partial  █ full

                      empty   partial      full
evaluated             77.2%      0.0%     22.8%
by block analysis     77.2%      0.0%     22.8%

pairs kept        22.8%, 57.4% of those within a sequence
work skipped      77.2%, blocks between sequences included; each sequence is analysed alone
"""

PACKED_BLOCKS = """\
550 queries (down) by 550 keys (across), blocks of 64 by 32 from each sequence's start, h = 0
sequences of 300, 0, 60, 190; b is their number, on the margins; positions restart in each

  0                   2   3
0 ▒▒▒▒................................
  ▒▒██▒▒▒▒............................
  ▒▒▒▒▒▒██▒▒▒▒........................
  ....▒▒▒▒▒▒██▒▒▒▒....................
  ........▒▒▒▒▒▒██▒▒▒▒................
  ....................▒▒▒▒............
  ........................▒▒▒▒........
  ........................▒▒██▒▒▒▒....
  ........................▒▒▒▒▒▒██▒▒▒▒

. empty  ▒ partial  █ full

                      empty   partial      full
evaluated             76.5%     19.8%      3.7%
by block analysis     76.5%     19.8%      3.7%

pairs kept        13.5%, 31.6% of those within a sequence
work skipped      76.5%, blocks between sequences included; each sequence is analysed alone
"""


# --------------------------------------------------------------------------------------------------------- the picture


def test_causal(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "causal", "--q-len", "512") == CAUSAL


def test_a_text_stream_without_an_encoding() -> None:
    """Such as the stream that `contextlib.redirect_stdout` puts in the place of the terminal."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert main(["show", "causal", "--q-len", "512"]) == 0
    assert stream.getvalue() == CAUSAL


def test_a_window_at_the_end_on_an_ascii_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--q-len 256 --kv-len 512 --q-offset end --set size=100 --block 64x32 --batch 1 --head 3"
    monkeypatch.setattr(type(sys.stdout), "encoding", "ascii", raising=False)
    assert shown(capsys, "window", *options.split()) == WINDOW


def test_gemma2_local_is_coarsened_to_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "16")
    out = shown(capsys, "gemma2_local", "--q-len", "8192", "--block", "256")
    assert GEMMA2_LOCAL in out


def test_without_a_mask_nothing_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "full", "--q-len", "100", "--kv-len", "70", "--block", "32")
    assert "mask      -\n" in out
    assert "schedule  dense\n" in out
    assert "\n██████\n" in out
    assert out.endswith("pairs kept        100.0%\nwork skipped      0.0%\n")


def test_a_picture_of_too_many_pairs_is_by_block_analysis(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "causal", "--q-len", "131072")
    assert "blocks of 4096 by 4096" in out
    assert "evaluated" not in out
    assert "pairs kept        not counted, there are 17179869184\nwork skipped      48.4%\n" in out


def test_examples_of_the_spec_stand_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert "scalars   length: int = 128\n" in shown(capsys, "prefix_lm")
    out = shown(capsys, "document", "--q-len", "900", "--block", "300")  # documents of 300
    assert "\n▒▒....\n..▒▒..\n....▒▒\n" in out


def test_what_block_analysis_cannot_see_is_drawn_beside(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    out = shown(capsys, "odd", "--variants", str(own), "--q-len", "128")
    assert "tensors   w[h, kv_idx] float32\n          seen[hkv] bool\n" in out
    assert "evaluated:" in out
    assert "by block analysis:" in out


def test_values_that_nothing_gives_are_stated(capsys: pytest.CaptureFixture[str], own: Path, tmp_path: Path) -> None:
    options = ["--variants", str(own), "--q-len", "128"]
    flags = "seen is true at every 16th last index, because it has no example; --tensor seen=FILE.npy gives its values"
    weights = "\nw is 0, because it has no example; --tensor w=FILE.npy gives its values\n"
    assert f"h = 0{weights}{flags}\n\n" in shown(capsys, "odd", *options)
    assert "\nz is 0 to 4, rising with its last index, because" in shown(capsys, "readers", *options)
    assert "because" not in shown(capsys, "document", "--q-len", "128")
    assert "because" not in shown(capsys, "sunk", *options)  # only its score reads a tensor
    np.save(tmp_path / "w.npy", np.ones((8, 128), np.float32))
    out = shown(capsys, "odd", *options, "--tensor", f"w={tmp_path / 'w.npy'}")
    assert weights not in out
    assert flags in out


def test_arguments_besides_the_mask_are_named(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    out = shown(capsys, "sunk", "--variants", str(own), "--q-len", "64")
    assert "score     score + bias\ntensors   bias[] float32 (grad)\n" in out
    assert "\nextras    decay: log-decay g [B, S, Hq]; " in out
    assert "\n          sink: a logit per head" in out


def test_tensors_are_read_from_files_and_decide_the_heads(
    capsys: pytest.CaptureFixture[str], own: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "w.npy", np.full((4, 128), 1e9))
    np.save(tmp_path / "seen.npy", np.array([True, False]))
    files = [f"--tensor={name}={tmp_path / name}.npy" for name in ("w", "seen")]
    options = ["odd", "--variants", str(own), "--q-len", "128", "--block", "64"]
    out = shown(capsys, *options, *files, "--head", "1")
    assert "h = 1, hkv = 0\n" in out
    assert "\n██▒▒\n" not in out
    assert "pairs kept        51.2%" in out  # tanh(1e9) is 1: the mask is causal with one more key
    out = shown(capsys, *options, *files, "--head", "2")
    assert "h = 2, hkv = 1\n" in out
    assert "pairs kept        100.0%" in out


def test_a_coarse_block_is_partial_where_its_blocks_differ() -> None:
    e, p, f = Status.EMPTY, Status.PARTIAL, Status.FULL
    fine = np.array([[e, e, f, f, e], [e, e, f, f, f], [p, e, e, f, p]])
    np.testing.assert_array_equal(coarsened(fine, 2), [[e, f, p], [p, p, p]])


def test_an_image_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, length in (("small", 200), ("large", 4096)):
        shown(capsys, "window", "--q-len", str(length), "--png", str(tmp_path / f"{name}.png"))
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


# ----------------------------------------------------------------------------------------------------- packed sequences


def test_short_packed_sequences_are_drawn_pair_by_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "causal", "--segments", "5,3,9") == PACKED


def test_packed_sequences_in_blocks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--segments 300,0,60,190 --set size=100 --block 64x32"
    assert shown(capsys, "window", *options.split()).endswith(PACKED_BLOCKS)
    monkeypatch.setenv("COLUMNS", "10")
    assert "(each for 5 by 5 blocks)" in shown(capsys, "window", *options.split())


def test_numbers_of_sequences_stand_where_there_is_room(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "full", "--segments", ",".join(["1"] * 12))
    assert "\n   0 1 2 3 4 5 6 7 8 9 10\n0  ██......" in out
    assert "\n11 ......................██\n" in out
    out = shown(capsys, "full", "--segments", ",".join(["1"] * 100))
    assert "\n   0 4 8 12  20  28" in out
    assert "\n4  ..▒▒" in out


def test_the_default_block_of_packed_sequences_holds_each_where_they_are_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "blocks of 8 by 8 from" in shown(capsys, "causal", "--segments", "100,100")
    assert "blocks of 16 by 16 from" in shown(capsys, "causal", "--segments", ",".join(["9"] * 40))


def test_too_many_packed_pairs_are_judged_by_block_analysis(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "causal", "--segments", "16384,1024")
    assert "evaluated" not in out
    assert "pairs kept        not counted, there are 303038464, 269484032 within a sequence\n" in out
    # Here there are far more pairs, but few of them are within a sequence.
    assert "evaluated" in shown(capsys, "causal", "--segments", ",".join(["512"] * 64))


def test_examples_are_those_of_each_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "document", "--segments", "600,300", "--block", "300")  # documents of 300 in each
    assert "\n0 ▒▒....\n  ..▒▒..\n1 ....▒▒\n" in out
    out = shown(capsys, "padding", "--segments", "1000,1000")  # its example: 1000 keys, and 900 of the second row
    assert "pairs kept        47.5%, 95.0% of those within a sequence\n" in out


@pytest.mark.parametrize("q_offset", [0, 3, -2, -9])
def test_own_tensors_of_packed_sequences_are_read_by_row(own: Path, tmp_path: Path, q_offset: int) -> None:
    """Each read equals the definition of packed calls, written out for one pair at a time."""
    lengths = [4, 0, 5, 1]
    starts, total = np.cumsum([0, *lengths]), sum(lengths)
    rng = np.random.default_rng(0)
    sizes = {"x": (2, total), "y": (total,), "z": (4,), "w": (total, total), "table": (3, 4)}
    x, y, z, w, table = tensors = [rng.integers(-9, 9, size) for size in sizes.values()]
    for name, tensor in zip(sizes, tensors, strict=True):
        np.save(tmp_path / f"{name}.npy", tensor)
    calls = make_packed_calls(
        load(own).variants["readers"],
        lengths=lengths,
        q_offset=q_offset,
        head=1,
        scalars={},
        files={name: tmp_path / f"{name}.npy" for name in sizes},
    )
    assert [(call.b, call.q_len, call.kv_len) for call in calls] == [(0, 4, 4), (2, 5, 5), (3, 1, 1)]
    mask = load(own).variants["readers"].mask
    assert mask is not None
    got = block_diagonal([pairs(mask, call) for call in calls])
    want = np.zeros((total, total), dtype=bool)
    for b, (start, length) in enumerate(zip(starts[:-1], lengths, strict=True)):

        def key(i: int, start: int = start, length: int = length) -> int:
            return start + min(max(i, 0), length - 1)

        def query(i: int, start: int = start, length: int = length) -> int:
            return start + min(max(max(i, 0) - q_offset, 0), length - 1)

        for row in range(length):
            for kv_idx in range(length):
                q_idx = row + q_offset
                left = x[1, key(kv_idx)] + y[query(q_idx)] + z[b]
                right = w[query(q_idx), key(kv_idx)] + x[1, key(q_idx - 1)] + y[query(kv_idx + 1)]
                want[start + row, start + kv_idx] = left > right - table[min(kv_idx, 2), b]
    np.testing.assert_array_equal(got, want)
    assert want.any()


def test_tensors_of_a_packed_call_are_read_from_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.save(tmp_path / "doc.npy", np.array([7, 7, 1, 1, 1, 1, 1, 2]))
    out = shown(capsys, "document", "--segments", "4,4", "--tensor", f"doc={tmp_path / 'doc.npy'}")
    assert "pairs kept        20.3%, 40.6% of those within a sequence\n" in out  # 3 + 3 and 6 + 1 of 64


def test_an_image_of_packed_sequences_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for segments in ("300,0,50", "3000,200", "7"):
        shown(capsys, "window", "--segments", segments, "--png", str(tmp_path / "x.png"))
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
