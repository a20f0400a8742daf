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
    what = f"the spec (default: {DEFAULT_VARIANTS}; {COLLECTION}: the variants that come with the generator)"
    parser.add_argument("--variants", type=Path, metavar="FILE", help=what)


def out_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"the package (default: {DEFAULT_OUT}/ beside the spec)"
    )


def from_config_option(parser: argparse.ArgumentParser) -> None:
    what = "write the spec of a model of transformers, made from its config, beside --out or to --variants; then render"
    parser.add_argument("--from-config", type=Path, metavar="CONFIG", help=what)


def package_option(parser: argparse.ArgumentParser) -> None:
    what = f"the package by the name that Python imports it by, in the place of --out (default: {PACKAGE})"
    parser.add_argument("--package", metavar="NAME", help=what)


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with what a package's manifest says")


def force_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force",
        action="store_true",
        help="overwrite files edited by hand and delete files the generator did not make",
    )


def name_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a variant of the spec")


def call_options(parser: argparse.ArgumentParser) -> None:
    """The lengths and arguments of a call, and the batch row and head to look at."""
    add = parser.add_argument
    add("--q-len", type=_at_least(1), metavar="N", help="queries (default: 1024)")
    add("--kv-len", type=_at_least(1), metavar="N", help="keys (default: as many as queries)")
    add("--q-offset", type=_offset, default=0, metavar="N|end", help="position of the first query (default: 0)")
    add("--batch", type=_at_least(0), metavar="B", help="batch row (default: 0)")
    add("--segments", type=_lengths, metavar="N,N,...", help="a packed call: the lengths of its sequences")
    add("--head", type=_at_least(0), default=0, metavar="H", help="query head (default: 0)")
    add("--set", type=_assignment, action="append", default=[], metavar="NAME=VALUE", help="a scalar")
    add("--tensor", type=_assignment, action="append", default=[], metavar="NAME=FILE.npy", help="a tensor")


def picture_options(parser: argparse.ArgumentParser) -> None:
    size = "queries by keys of a block (default: from 64 on, packed from 1 on, such that every block is drawn)"
    parser.add_argument("--block", type=_block, metavar="M[xN]", help=size)
    what = "a call on a cache of pages of N tokens: those that its last query reads, and its splits"
    parser.add_argument("--pages", type=_at_least(1), metavar="N", help=what)
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw an image; needs matplotlib")


def split_options(parser: argparse.ArgumentParser) -> None:
    """How the call is split over several GPUs; all of it goes with `--ranks`."""
    add = parser.add_argument_group("several GPUs, by the planner of a package").add_argument
    what = "draw which of N GPUs, or of N nodes of M, computes what, with predicted times"
    add("--ranks", type=_ranks, metavar="N[xM]", help=what)
    add("--seq", type=_at_least(1), metavar="N", help="queries and keys (default: 131072)")
    add("--heads", type=_heads, default=(32, 8), metavar="N/N", help="query heads and key heads (default: 32/8)")
    add("--head-dim", type=_at_least(8), default=128, metavar="N", help="(default: 128)")
    add("--strategy", default="auto", metavar="NAME", help="how ranks compute together (default: auto, the fastest)")


def studio_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, default=0, metavar="N", help="(default: any that is free)")
    parser.add_argument("--no-open", action="store_true", help="print the page's address without opening a browser")


def tune_options(parser: argparse.ArgumentParser) -> None:
    """What to tune, and how long. Variants, dtypes and head_dims that are not named are the spec's, without float32."""
    add = parser.add_argument
    add("names", nargs="*", metavar="VARIANT", help="variants of the package (default: all)")
    add("--passes", type=_words, default=[], metavar="LIST", help="of fwd,dkdv,dq (default: these), decode,paged_fwd")
    add("--dtypes", type=_words, default=[], metavar="LIST", help="such as bf16,fp16 (default: the spec's 16-bit ones)")
    add("--head-dims", type=_numbers, default=[], metavar="LIST", help="such as 64,128 (default: the spec's)")
    add("--seqs", type=_numbers, default=[], metavar="LIST", help="lengths to time (default: 512 to 16384)")
    add("--modes", type=_words, default=[], metavar="LIST", help="of dense,packed,segmented (default: dense)")
    add("--budget", type=_minutes, default=0.0, metavar="MINUTES", help="for all of it: fewer tiles are tried")
    add("--jobs", type=_at_least(1), metavar="N", help="processes that compile (default: the cores but one)")
    add("--families", action="store_true", help="no tiles: with those there are, time the families of kernels alone")
    add("--again", action="store_true", help="also what is tuned already on these kernels")


def explain_options(parser: argparse.ArgumentParser) -> None:
    """The call to explain."""
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a variant of the package")
    add("--gpu", metavar="NAME", help="such as h100, or an architecture such as sm_90 (default: this machine's)")
    add("--dtype", default="bf16", metavar="NAME", help="(default: bf16)")
    add("--head-dim", type=_at_least(16), default=128, metavar="N", help="(default: 128)")
    add("--seq", type=_at_least(1), default=4096, metavar="N", help="keys of a sequence (default: 4096)")
    add("--group", type=_at_least(1), default=1, metavar="N", help="query heads per key head (default: 1)")
    add("--mode", default="dense", metavar="NAME", help="dense, packed or segmented (default: dense)")
    add("--kv-heads", type=_at_least(1), default=8, metavar="N", help="key heads, for splits of a cache (default: 8)")


def warm_options(parser: argparse.ArgumentParser) -> None:
    """The calls whose kernels are compiled ahead of time."""
    add = parser.add_argument
    add("names", nargs="*", metavar="VARIANT", help="variants of the package")
    what = "the variants, heads and head_dims of a model of transformers, in the place of names"
    add("--model", type=Path, metavar="CONFIG", help=what)
    add("--gpu", metavar="NAME", help="such as h100, or an architecture such as sm_90 (default: this machine's)")
    add("--modes", type=_words, default=[], metavar="LIST", help="of dense,packed,segmented,paged (default: dense)")
    add("--passes", type=_words, default=[], metavar="LIST", help="of fwd,bwd (default: both)")
    add("--dtypes", type=_words, default=[], metavar="LIST", help="such as bf16,fp16 (default: bf16)")
    add("--head-dims", type=_numbers, default=[], metavar="LIST", help="(default: 128)")
    add("--heads", type=_heads, default=(32, 8), metavar="N/N", help="query heads and key heads (default: 32/8)")
    what = "lengths; one that tiles divide stands for all of its size, one that they do not for all others"
    add("--seqs", type=_numbers, default=[4096, 4095], metavar="LIST", help=f"{what} (default: 4096,4095)")
    add("--batch", type=_at_least(1), default=1, metavar="N", help="(default: 1, whose kernels serve any)")
    what = "axes in memory: bhsd, or bshd as of projections (default: bhsd; with --model bshd)"
    add("--layout", metavar="NAME", help=what)
    add("--page-sizes", type=_numbers, default=[64], metavar="LIST", help="of paged caches (default: 64)")
    add("--frozen", action="store_true", help="no gradients of a variant's own tensors, such as slopes")
    add("--jobs", type=_at_least(1), default=os.cpu_count() or 1, metavar="N", help="processes (default: a core each)")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [_at_least(1)(word) for word in text.split(",")]


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
    what = "a mod or the factory of one; MASK+SCORE makes one entry of two (default: all)"
    add("--function", nargs="+", action="extend", default=[], metavar="NAME", help=what)
    add("--out", type=Path, metavar="FILE", help="write the spec there (default: print it)")


def passed_on(parser: argparse.ArgumentParser) -> None:
    """Whatever follows, `--help` too, is for another program."""
    parser.prefix_chars = ""
    parser.add_argument("arguments", nargs="*", help="options of `python -m bench`; --help lists them")


def hub_options(parser: argparse.ArgumentParser) -> None:
    """The package, and how its kernel is published."""
    add = parser.add_argument
    add("package", nargs="?", type=Path, default=Path(PACKAGE), metavar="PACKAGE", help=f"(default: {PACKAGE})")
    add("--out", type=Path, default=Path("build/hub"), metavar="DIR", help="where to write (default: build/hub)")
    add("--name", default="attention-codegen", metavar="NAME", help="of the repository (default: attention-codegen)")
    add("--owner", default="your-name", metavar="NAME", help="of the repository, for its card (default: your-name)")
    add("--version", type=_at_least(0), default=0, metavar="N", help="of the interface (default: 0, for beta stages)")
    what = "then load it with the library `kernels`, on the CPU, and compare each op and layer with the package's"
    add("--check", action="store_true", help=what)


def lint_options(parser: argparse.ArgumentParser) -> None:
    """The kernels of the package to compile, and how."""
    add = parser.add_argument
    add("names", nargs="*", metavar="VARIANT", help="a variant of the spec (default: all)")
    add("--arch", metavar="NAME,...", help="chips such as sm_90,gfx942 (default: all)")
    add("--dtype", metavar="NAME,...", help="types of q, k and v (default: bfloat16,float32)")
    add("--head-dim", metavar="D,...", help="default: the spec's, and the largest that each config serves")
    add("--passes", metavar="NAME,...", help="among fwd,dkdv,dq,decode,paged_fwd (default: all)")
    add("--modes", metavar="NAME,...", help="among dense,packed,segmented,paged (default: all)")
    add("--fast", action="store_true", help="every config for one variant, every variant for one config")
    add("--tuned", action="store_true", help="also what is tuned, for the chips of those GPUs")
    add("--jobs", type=_at_least(1), default=os.cpu_count() or 1, metavar="N", help="processes (default: a core each)")
    add("--json", type=Path, metavar="FILE", help="also write everything that was found")


def compare_options(parser: argparse.ArgumentParser) -> None:
    """Two packages, and which of their kernels to compare."""
    add = parser.add_argument
    add("old", type=Path, metavar="OLD", help="the folder of a package, such as one rendered from an older revision")
    add("new", type=Path, metavar="NEW", help="the folder of the other package")
    add("names", nargs="*", metavar="VARIANT", help="a variant of the spec (default: all)")
    add("--arch", metavar="NAME,...", help="chips (default: sm_80, sm_90 and those of tuned files)")
    add("--modes", metavar="NAME,...", help="among dense,packed,segmented (default: all)")
    add("--fast", action="store_true", help="each kernel with one config a chip (default: every default and tuned one)")
    add("--all", action="store_true", help="compile also kernels whose code and imports are equal")
    add("--machine-code", action="store_true", help="compile to machine code also where Triton's IR is equal")
    add("--rekey", action="store_true", help="compare what tuned files of NEW hold; rewrite their hashes where equal")
    add(
        "--jobs", type=_at_least(2), default=max(2, os.cpu_count() or 2), metavar="N", help="processes (default: cores)"
    )


def _heads(text: str) -> tuple[int, int]:
    counts = text.split("/")
    if len(counts) > 2 or not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise argparse.ArgumentTypeError(f"expected query heads and key heads such as 32/8, got {text!r}")
    return int(counts[0]), int(counts[-1])


def _at_least(least: int) -> Callable[[str], int]:
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
