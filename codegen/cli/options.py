"""The options of the command line, and how their text is read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from codegen import PACKAGE

DEFAULT_VARIANTS = Path("variants.yaml")
DEFAULT_OUT = "generated"
COLLECTION = "library.yaml"

Option = Callable[[argparse.ArgumentParser], object]
"""Adds one option to a subcommand."""


def variants_option(parser: argparse.ArgumentParser) -> None:
    what = f"the spec file (default: {DEFAULT_VARIANTS}); {COLLECTION} names the built-in variants"
    parser.add_argument("--variants", type=Path, metavar="FILE", help=what)


def out_option(parser: argparse.ArgumentParser) -> None:
    what = f"folder of the package (default: {DEFAULT_OUT}/ beside the spec)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=what)


def from_config_option(parser: argparse.ArgumentParser) -> None:
    what = "config.json of a transformers model, or its folder: first write its spec to --variants, or beside --out"
    parser.add_argument("--from-config", type=Path, metavar="CONFIG", help=what)


def package_option(parser: argparse.ArgumentParser) -> None:
    what = f"import name of an installed package, instead of --out (default: {PACKAGE})"
    parser.add_argument("--package", metavar="NAME", help=what)


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON with the same entries as a package's manifest")


def force_option(parser: argparse.ArgumentParser) -> None:
    what = "overwrite files edited by hand and delete files that the generator did not write"
    parser.add_argument("--force", action="store_true", help=what)


def name_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the variant to show")


def call_options(parser: argparse.ArgumentParser) -> None:
    """The lengths and arguments of a call, and the batch row and head to look at."""
    add = parser.add_argument
    add("--q-len", type=at_least(1), metavar="N", help="number of queries (default: 1024)")
    add("--kv-len", type=at_least(1), metavar="N", help="number of keys (default: same as queries)")
    what = "position of the first query; end: such that the last query is at the last key (default: 0)"
    add("--q-offset", type=_offset, metavar="N|end", help=what)
    add("--batch", type=at_least(0), metavar="B", help="batch index to show (default: 0)")
    add("--segments", type=_lengths, metavar="N,N,...", help="show a packed call with sequences of these lengths")
    add("--head", type=at_least(0), default=0, metavar="H", help="query head to show (default: 0)")
    add("--set", type=_assignment, action="append", default=[], metavar="NAME=VALUE", help="value of a scalar argument")
    what = "value of a tensor argument"
    add("--tensor", type=_assignment, action="append", default=[], metavar="NAME=FILE.npy", help=what)


def picture_options(parser: argparse.ArgumentParser) -> None:
    size = "queries by keys per block (default: the smallest size, from 64 on, or 1 if packed, that fits the picture)"
    parser.add_argument("--block", type=_block, metavar="M[xN]", help=size)
    what = "show a call on a paged cache with pages of N tokens: which pages are read, and how keys are split"
    parser.add_argument("--pages", type=at_least(1), metavar="N", help=what)
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw an image; needs matplotlib")


def split_options(parser: argparse.ArgumentParser) -> None:
    """How the call is split over several GPUs; all of it goes with `--ranks`."""
    add = parser.add_argument_group("a call over several GPUs, as planned by the package").add_argument
    what = "draw which GPU computes which blocks, on N GPUs or N nodes of M GPUs, with predicted times"
    add("--ranks", type=_ranks, metavar="N[xM]", help=what)
    add("--seq", type=at_least(1), metavar="N", help="number of queries and of keys (default: 131072)")
    what = "number of query heads and key heads (default: 32/8)"
    add("--heads", type=_heads, metavar="N/N", help=what)
    add("--head-dim", type=at_least(8), metavar="N", help="head dimension (default: 128)")
    add("--strategy", metavar="NAME", help="how GPUs share the work (default: auto, the fastest by a cost model)")


def studio_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, default=0, metavar="N", help="port of the server (default: any free one)")
    parser.add_argument("--no-open", action="store_true", help="print the page's address without opening a browser")


def tune_options(parser: argparse.ArgumentParser) -> None:
    """What to tune, and how long. Variants, dtypes and head_dims that are not named are the spec's, without float32."""
    add = parser.add_argument
    add("names", nargs="*", metavar="VARIANT", help="variants to tune (default: all)")
    what = "some of fwd,dkdv,dq,decode,paged_fwd (default: fwd,dkdv,dq)"
    add("--passes", type=_words, default=[], metavar="LIST", help=what)
    what = "such as bf16,fp16 (default: the spec's 16-bit dtypes)"
    add("--dtypes", type=_words, default=[], metavar="LIST", help=what)
    add("--head-dims", type=_numbers, default=[], metavar="LIST", help="such as 64,128 (default: the spec's)")
    add("--seqs", type=_numbers, default=[], metavar="LIST", help="sequence lengths to time (default: 512 to 16384)")
    add("--modes", type=_words, default=[], metavar="LIST", help="some of dense,packed,segmented (default: dense)")
    what = "limit of the total time; fewer tiles are tried (default: none)"
    add("--budget", type=_minutes, default=0.0, metavar="MINUTES", help=what)
    add("--jobs", type=at_least(1), metavar="N", help="compiler processes (default: one less than there are cores)")
    add("--families", action="store_true", help="compare kernel families only, with the tiles tuned so far")
    add("--again", action="store_true", help="tune kernels again that are already tuned")


def explain_options(parser: argparse.ArgumentParser) -> None:
    """The call to explain."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="the variant to explain")
    what = "a GPU such as h100, or an architecture such as sm_90 (default: this machine's GPU)"
    add("--gpu", metavar="NAME", help=what)
    add("--dtype", metavar="NAME", help="dtype of q, k and v (default: bf16)")
    add("--head-dim", type=at_least(8), metavar="N", help="head dimension (default: 128)")
    add("--seq", type=at_least(1), metavar="N", help="sequence length (default: 4096)")
    add("--group", type=at_least(1), metavar="N", help="query heads per key head (default: 1)")
    add("--mode", metavar="NAME", help="dense, packed or segmented (default: dense)")
    what = "key heads, for decoding on a paged cache (default: 8)"
    add("--kv-heads", type=at_least(1), metavar="N", help=what)


def warm_options(parser: argparse.ArgumentParser) -> None:
    """The calls whose kernels are compiled ahead of time."""
    add = parser.add_argument
    add("names", nargs="*", metavar="VARIANT", help="variants to compile; not with --model")
    what = "config.json of a transformers model, or its folder, which gives variants, heads and head_dims"
    add("--model", type=Path, metavar="CONFIG", help=what)
    what = "a GPU such as h100, or an architecture such as sm_90 (default: this machine's GPU)"
    add("--gpu", metavar="NAME", help=what)
    what = "some of dense,packed,segmented,paged (default: dense)"
    add("--modes", type=_words, default=[], metavar="LIST", help=what)
    add("--passes", type=_words, default=[], metavar="LIST", help="some of fwd,bwd (default: both)")
    add("--dtypes", type=_words, default=[], metavar="LIST", help="such as bf16,fp16 (default: bf16)")
    what = "such as 64,128, or 192/128 where values have another head dim than keys (default: 128)"
    add("--head-dims", type=_head_dims, default=[], metavar="LIST", help=what)
    what = "number of query heads and key heads (default: 32/8)"
    add("--heads", type=_heads, default=(32, 8), metavar="N/N", help=what)
    what = "sequence lengths; include one that is a multiple of the tiles and one that is not"
    add("--seqs", type=_numbers, default=[4096, 4095], metavar="LIST", help=f"{what} (default: 4096,4095)")
    what = "batch size; affects calls on paged caches, and backwards of query heads that share key heads (default: 1)"
    add("--batch", type=at_least(1), default=1, metavar="N", help=what)
    what = "order of q, k and v in memory: bhsd or bshd (default: bhsd; with --model bshd)"
    add("--layout", metavar="NAME", help=what)
    what = "tokens per page of paged caches (default: 64)"
    add("--page-sizes", type=_numbers, default=[64], metavar="LIST", help=what)
    what = "dtype of paged caches, float8_e4m3fn or float8_e5m2 (default: that of q)"
    add("--cache", metavar="NAME", help=what)
    what = "scales of such caches: number, head or token (default: number)"
    add("--scales", metavar="NAME", help=what)
    add("--frozen", action="store_true", help="leave out gradients of a variant's own tensors, such as slopes")
    what = "compiler processes (default: one per core)"
    add("--jobs", type=at_least(1), default=os.cpu_count() or 1, metavar="N", help=what)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [at_least(1)(word) for word in text.split(",")]


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"expected minutes above 0, got {text!r}")
    return minutes


def port_options(parser: argparse.ArgumentParser) -> None:
    """A Python file with mods of FlexAttention, and which of them."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="Python source with mask_mod or score_mod functions; it is never run")
    what = "functions to translate, or functions that return them; MASK+SCORE: one variant from both (default: all)"
    add("--function", nargs="+", action="extend", default=[], metavar="NAME", help=what)
    add("--out", type=Path, metavar="FILE", help="file to write the spec to (default: print it)")


def passed_on(parser: argparse.ArgumentParser) -> None:
    """Whatever follows, `--help` too, is for another program."""
    parser.prefix_chars = ""
    parser.add_argument("arguments", nargs="*", help="options of `python -m bench`; --help lists them")


def hub_options(parser: argparse.ArgumentParser) -> None:
    """The package, and how its kernel is published."""
    add = parser.add_argument
    what = f"folder of the package (default: {PACKAGE})"
    add("package", nargs="?", type=Path, default=Path(PACKAGE), metavar="PACKAGE", help=what)
    add("--out", type=Path, default=Path("build/hub"), metavar="DIR", help="folder to write to (default: build/hub)")
    what = "name of the Hub repository (default: attention-codegen)"
    add("--name", default="attention-codegen", metavar="NAME", help=what)
    what = "owner of the Hub repository, for its card (default: your-name)"
    add("--owner", default="your-name", metavar="NAME", help=what)
    what = "version of the kernel's interface (default: 0, a beta)"
    add("--version", type=at_least(0), default=0, metavar="N", help=what)
    what = "load the result with the `kernels` library on the CPU, and compare its ops and layers with the package's"
    add("--check", action="store_true", help=what)


def lint_options(parser: argparse.ArgumentParser) -> None:
    """The kernels of the package to compile, and how."""
    add = parser.add_argument
    add("names", nargs="*", metavar="VARIANT", help="variants to compile (default: all)")
    add("--arch", metavar="NAME,...", help="chips such as sm_90,gfx942 (default: all with tiles of their own)")
    add("--dtype", metavar="NAME,...", help="dtypes of q, k and v (default: bfloat16,float32)")
    what = "head dimensions (default: the spec's, and the largest that each default tile serves)"
    add("--head-dim", metavar="D,...", help=what)
    add("--passes", metavar="NAME,...", help="some of fwd,dkdv,dq,decode,paged_fwd (default: all)")
    add("--modes", metavar="NAME,...", help="some of dense,packed,segmented,paged (default: all)")
    what = "compile every tile for one variant only, and every variant for one chip and head dimension only"
    add("--fast", action="store_true", help=what)
    add("--tuned", action="store_true", help="compile with tuned tiles too, for the GPUs that they were tuned on")
    what = "compiler processes (default: one per core)"
    add("--jobs", type=at_least(1), default=os.cpu_count() or 1, metavar="N", help=what)
    add("--json", type=Path, metavar="FILE", help="also write all results as JSON")


def compare_options(parser: argparse.ArgumentParser) -> None:
    """Two packages, and which of their kernels to compare."""
    add = parser.add_argument
    add("old", type=Path, metavar="OLD", help="folder of a package, such as one from an older revision")
    add("new", type=Path, metavar="NEW", help="folder of the package to compare with it")
    add("names", nargs="*", metavar="VARIANT", help="variants to compare (default: all)")
    add("--arch", metavar="NAME,...", help="chips (default: sm_80, sm_90 and those with tuned tiles)")
    add("--modes", metavar="NAME,...", help="some of dense,packed,segmented (default: all)")
    what = "compare each kernel with one tile per chip, not with all default and tuned tiles"
    add("--fast", action="store_true", help=what)
    add("--all", action="store_true", help="also compile kernels whose code and imports are equal")
    add("--machine-code", action="store_true", help="compile to machine code even if Triton's IR is equal")
    what = "compare the tuned kernels; where equal, mark the tuned files of NEW as valid for its kernels"
    add("--rekey", action="store_true", help=what)
    what = "compiler processes (default: one per core, at least 2)"
    add("--jobs", type=at_least(2), default=max(2, os.cpu_count() or 2), metavar="N", help=what)


def _heads(text: str) -> tuple[int, int]:
    return _pair(text, "query heads and key heads such as 32/8")


def _head_dims(text: str) -> list[tuple[int, int]]:
    return [_pair(word, "head dims such as 128, or of keys and values such as 192/128") for word in text.split(",")]


def _pair(text: str, expected: str) -> tuple[int, int]:
    """Two numbers above 0 with a slash between them, or one, which stands for both."""
    numbers = text.split("/")
    if len(numbers) > 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return int(numbers[0]), int(numbers[-1])


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is an integer of at least this size."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
        return int(text)

    return read


def _ranks(text: str) -> int | tuple[int, int]:
    """A number of ranks, or of nodes and of the ranks of a node."""
    counts = text.split("x")
    if len(counts) > 2 or not all(each.isdecimal() and int(each) > 0 for each in counts):
        raise argparse.ArgumentTypeError(f"expected a number of ranks such as 8, or nodes such as 2x8, got {text!r}")
    return int(counts[0]) if len(counts) == 1 else (int(counts[0]), int(counts[1]))


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def _lengths(text: str) -> list[int]:
    lengths = text.split(",")
    if not all(length.isdecimal() for length in lengths) or not any(map(int, lengths)):
        raise argparse.ArgumentTypeError(f"expected lengths such as 5,3,9, not all of them 0, got {text!r}")
    return [int(length) for length in lengths]


def _offset(text: str) -> int | Literal["end"]:
    if text == "end":
        return "end"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer or 'end', got {text!r}") from None


def _block(text: str) -> tuple[int, int]:
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"expected a positive size such as 128 or 128x64, got {text!r}")
    return int(sides[0]), int(sides[-1])


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value
