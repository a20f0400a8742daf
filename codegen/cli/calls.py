"""The call that the options of `show` describe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codegen.cli.places import package_path
from codegen.util.errors import CodegenError

if TYPE_CHECKING:
    from codegen.inspect.call import Call
    from codegen.spec.model import Variant


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the named options that the command line has."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def refuse(options: Mapping[str, object], message: str) -> None:
    """Raise for the first option that has a value, whose name replaces `{}` in the message."""
    for option, value in options.items():
        if value is not None:
            raise CodegenError(message.format(option))


def described_calls(variant: Variant, args: argparse.Namespace) -> list[Call]:
    """The call that `args` describe, or the sequences of a packed one."""
    from codegen.inspect.call import make_call, make_packed_calls  # numpy

    head, scalars, tensors = args.head, dict(args.set), {name: Path(file) for name, file in args.tensor}
    if args.pages is not None:
        others = {"--segments": args.segments, "--block": args.block, "--png": args.png}
        others["--q-offset"] = None if args.q_offset == "end" else args.q_offset
        refuse(others, "--pages shows one sequence whose queries are at the end, in text: leave it out, or {}")
    if args.segments:
        others = {"--q-len": args.q_len, "--kv-len": args.kv_len, "--batch": args.batch}
        refuse(others, "{} is no option of a packed call: leave it out, or --segments")
        lengths, q_offset = args.segments, 0 if args.q_offset == "end" else args.q_offset or 0
        return make_packed_calls(variant, lengths=lengths, q_offset=q_offset, head=head, scalars=scalars, files=tensors)
    q_len = args.q_len or (1024 if args.pages is None else 1)
    kv_len = args.kv_len or (q_len if args.pages is None else max(q_len, 1024))
    if args.pages is not None and q_len > kv_len:
        raise CodegenError(f"--q-len: expected at most the {kv_len} keys of the sequence, got {q_len}")
    call = make_call(
        variant,
        q_len=q_len,
        kv_len=kv_len,
        q_offset=kv_len - q_len if args.q_offset == "end" or args.pages is not None else args.q_offset or 0,
        batch=args.batch or 0,
        head=head,
        scalars=scalars,
        files=tensors,
    )
    return [call]


def check_one_gpu(args: argparse.Namespace) -> None:
    """Raise if `args` of a call on one GPU hold options that only a call over several uses."""
    refuse({"--seq": args.seq}, "{} goes with --ranks; --q-len says how many queries one GPU has")
    others = {"--heads": args.heads, "--head-dim": args.head_dim, "--strategy": args.strategy}
    refuse(others, "{} goes with --ranks: leave it out")
    package = {"--out": args.out, "--package": args.package}
    refuse(package, "{} goes with --ranks: leave it out; --variants names the spec of the variant")


SPLIT_SEQ = 131072
"""Queries and keys of a call over several GPUs, if no option says how many."""


def split_report(variant: Variant, args: argparse.Namespace) -> str:
    """The output of `show --ranks` for the call that `args` describe."""
    from codegen.inspect.ranks import Split, report

    others = {"--q-len": args.q_len, "--kv-len": args.kv_len, "--q-offset": args.q_offset}
    others |= {"--pages": args.pages, "--block": args.block, "--png": args.png}
    several = "{} is no option of a call over several ranks: leave it out; "
    refuse(others, several + "--seq says how many rows")
    if args.segments:
        refuse({"--seq": args.seq}, several + "the lengths of --segments add up to it")
    else:
        args.q_len = args.kv_len = args.seq or SPLIT_SEQ
    split = Split(ranks=args.ranks, **given(args, "heads", "head_dim", "strategy"))
    text = report(package_path(args), variant, described_calls(variant, args), args.segments or (), split)
    return text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)
