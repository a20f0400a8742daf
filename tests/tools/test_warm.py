"""`codegen warm`: a later call finds every kernel in Triton's cache, whatever its batch and length; bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from codegen.cli.main import main
from codegen.compile import offline
from codegen.compile.offline import compile_launches
from codegen.compile.packages import Package
from codegen.load.spec_file import load
from codegen.testing.calls import load_op
from codegen.util.errors import CodegenError
from codegen.warm import command, compiling
from codegen.warm.calls import Layer, Layout, Scales, Target, WarmCall
from codegen.warm.command import Failure, Report, lines
from codegen.warm.compiling import Kernel, Outcome, compile_task, kernels_of, tasks
from codegen.warm.model import layers_of
from generated._runtime.core.settings import INTERPRET
from tests.support.paths import DEFAULT_SPEC, ROOT

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 nothing is compiled")

SPEC = load(DEFAULT_SPEC)
PACKAGE = Package(root=str(ROOT), name="generated")
H100 = Target(arch="sm_90", gpu="h100")
CALL = WarmCall(
    variant="causal",
    mode="dense",
    dtype="bfloat16",
    head_dim=64,
    head_dim_v=64,
    heads=(4, 2),
    seq=4096,
    layout=Layout.BHSD,
)


@pytest.fixture(autouse=True)
def a_fresh_chip() -> None:
    """Make Triton forget the kernels that other tests compiled for the same chip in this process."""
    offline._absent_gpu.cache_clear()


def test_a_cache_that_cannot_be_written_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is compiled before that."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(knobs.cache, "dir", str(file))
    assert main(["warm", "causal", "--gpu", "h100"]) == 2
    expected = "TRITON_CACHE_DIR: expected a folder that can be written, for Triton's cache"
    assert capsys.readouterr() == ("", f"error: {expected}, got {file}: File exists\n")


def test_a_read_only_cache_with_kernels_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(CodegenError, match="Permission denied"):
        command.check_cache(tmp_path / "new")
    (tmp_path / "kernel").mkdir()
    command.check_cache(tmp_path)


LATER_CALL = """
import json
import torch
from triton import knobs
from codegen.compile.offline import compile_launches
from generated.torch import causal

hits = {}
knobs.compilation.listener = lambda *, src, cache_hit, **_: hits.update({src.name: cache_hit})
q, k, v = (torch.ones(3, heads, 1664, 64, dtype=torch.float16) for heads in (4, 2, 2))
compile_launches(lambda: causal(q, k, v), "causal", "sm_80")
print(json.dumps(hits))
"""


def keys(call: Callable[[], object], variant: str) -> set[tuple[str, str]]:
    """Names and Triton's keys of the kernels that a call launches on an H100; does not use the code under test."""
    found: set[tuple[str, str]] = set()

    def hook(*, key: str, fn: Any, **_: Any) -> bool:
        found.add((fn.name, key))
        return True

    knobs.runtime.jit_cache_hook = hook
    try:
        compile_launches(call, variant, "sm_90", gpu="h100")
    finally:
        knobs.runtime.jit_cache_hook = None
    return found


def warmed(call: WarmCall, target: Target = H100) -> set[tuple[str, str]]:
    spec = SPEC.variants[call.variant] if call.mode == "paged" else None
    return {(kernel.name, kernel.key) for kernel in kernels_of(call, target, PACKAGE, spec)}


def trained(variant: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> None:
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = load_op(variant)(*leaves, **arguments)
    torch.autograd.grad(o, leaves, torch.ones_like(o))


# ----------------------------------------------------------------------------------------------------- what is compiled


def test_later_process_compiles_nothing_anew(tmp_path: Path) -> None:
    # One small kernel: the forward on an A100, with another batch and length than in the later call.
    arguments = ["warm", "causal", "--gpu", "sm_80", "--seqs", "2048", "--head-dims", "64", "--heads", "4/2"]
    arguments += ["--dtypes", "fp16", "--passes", "fwd", "--jobs", "1"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}

    def python(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "1 kernels compiled, 0 found in the cache" in python("-m", "codegen", *arguments)
    files = sorted(tmp_path.rglob("*"))
    assert json.loads(python("-c", LATER_CALL)) == {"causal_fwd": True}
    assert "0 kernels compiled, 1 found in the cache" in python("-m", "codegen", *arguments)
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("layout", Layout)
def test_dense_kernels_are_those_of_other_batches_and_near_lengths(layout: Layout) -> None:
    def call(query_heads: int, key_heads: int) -> None:
        def tensor(heads: int) -> torch.Tensor:
            if layout is Layout.BHSD:
                return torch.ones(3, heads, 4608, 64, dtype=torch.bfloat16)
            return torch.ones(3, 4608, heads, 64, dtype=torch.bfloat16).transpose(1, 2)

        trained("causal", tensor(query_heads), tensor(key_heads), tensor(key_heads))

    assert warmed(replace(CALL, layout=layout, heads=(4, 4))) == keys(partial(call, 4, 4), "causal")
    # If query heads share key heads, the batch decides into how many groups the backward splits them.
    assert warmed(replace(CALL, layout=layout, batch=3)) == keys(partial(call, 4, 2), "causal")


def test_packed_and_segmented_kernels_are_those_of_other_documents() -> None:
    def packed() -> None:
        q, k, v = (torch.ones(8500, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        trained("causal", q, k, v, cu_seqlens_q=torch.tensor([0, 3900, 8500], dtype=torch.int32))

    def segmented(query_heads: int, key_heads: int) -> None:
        sizes = (query_heads, key_heads, key_heads)
        q, k, v = (torch.ones(2, heads, 4096, 64, dtype=torch.bfloat16) for heads in sizes)
        trained("causal", q, k, v, q_segment_ids=torch.arange(8192, dtype=torch.int32).view(2, 4096) // 100)

    assert warmed(replace(CALL, mode="packed")) == keys(packed, "causal")
    assert warmed(replace(CALL, mode="segmented", heads=(4, 4))) == keys(partial(segmented, 4, 4), "causal")
    assert warmed(replace(CALL, mode="segmented", batch=2)) == keys(partial(segmented, 4, 2), "causal")


def test_scalars_do_not_matter_and_frozen_tensors_do() -> None:
    def window() -> None:
        q, k, v = (torch.ones(1, heads, 4096, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        trained("window", q, k, v, size=17)

    def alibi() -> None:
        q, k, v = (torch.ones(1, heads, 4096, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        trained("alibi", q, k, v, slope=torch.ones(4))

    assert warmed(replace(CALL, variant="window")) == keys(window, "window")
    frozen = replace(CALL, variant="alibi", trained=False)
    assert warmed(frozen) == keys(alibi, "alibi") != warmed(replace(frozen, trained=True))


def test_inference_and_paged_calls_have_kernels_of_their_own() -> None:
    forward = warmed(replace(CALL, backward=False))
    assert forward < warmed(CALL)
    names = {name for name, _ in warmed(replace(CALL, mode="paged", page_size=64, backward=False))}
    assert names >= {"append_tokens", "causal_paged_fwd"}


@pytest.mark.parametrize("mode", ["dense", "packed"])
def test_values_may_have_another_head_dim(mode: str) -> None:
    def call() -> None:
        ahead = () if mode == "packed" else (1,)
        axes = (4096, 4) if mode == "packed" else (4, 4096)
        q, k, v = (torch.ones(*ahead, *axes, dim, dtype=torch.bfloat16) for dim in (192, 192, 128))
        named = {"cu_seqlens_q": torch.tensor([0, 4096], dtype=torch.int32)} if mode == "packed" else {}
        trained("causal", q, k, v, **named)

    assert warmed(replace(CALL, mode=mode, head_dim=192, head_dim_v=128, heads=(4, 4))) == keys(call, "causal")


def test_latent_attention_on_pages_runs_its_kernel() -> None:
    latent = replace(CALL, mode="paged", page_size=64, backward=False, head_dim=576, head_dim_v=512, heads=(128, 1))
    names = {name for name, _ in warmed(latent)}
    assert names >= {"append_tokens", "causal_paged_hopper_latent"}
    small = replace(latent, cache="float8_e4m3fn", scales=Scales.TOKEN)
    assert {name for name, _ in warmed(small)} == names
    assert {name for name, _ in warmed(small) - warmed(latent)} == {"append_tokens", "causal_paged_hopper_latent"}

    def own_caches() -> None:
        q, k, v = (
            torch.ones(*sizes, dtype=torch.bfloat16) for sizes in ((1, 4, 1, 192), (64, 64, 4, 192), (64, 64, 4, 128))
        )
        pages = torch.arange(64, dtype=torch.int32)[None]
        load_op("causal")(q, k, v, page_table=pages, kv_lengths=torch.tensor([4096], dtype=torch.int32))

    # With several key heads values have a cache of their own.
    assert keys(own_caches, "causal") < warmed(replace(latent, head_dim=192, head_dim_v=128, heads=(4, 4)))


def test_each_of_two_specialisations_of_one_kernel_is_compiled_alone() -> None:
    call = replace(CALL, mode="paged", page_size=64, backward=False, seq=512)
    spec = SPEC.variants["causal"]
    plans = [kernel for kernel in kernels_of(call, H100, PACKAGE, spec) if kernel.name == "causal_paged_plan"]
    assert len(plans) == 2
    # Launches of the same call that are refused do not hide the wanted one.
    for kernel in plans:
        with compiling._refusing(lambda each, wanted=kernel: each != wanted):  # type: ignore[misc]
            found = compiling._launch(call, H100, PACKAGE, spec)
        assert set(found) == {"causal_paged_plan"}
        assert found["causal_paged_plan"].asm["cubin"]


def test_tuned_tiles_of_the_gpu_are_compiled() -> None:
    call = replace(CALL, seq=1024)
    assert warmed(call) != warmed(call, Target(arch="sm_90", gpu=""))


def test_kernels_of_several_calls_are_compiled_once() -> None:
    calls = [CALL, replace(CALL, batch=2), replace(CALL, backward=False), replace(CALL, seq=4095)]
    chosen = tasks([(call, None) for call in calls], H100, PACKAGE, lambda *_: pytest.fail("no call is refused"))
    one, cut = warmed(CALL), warmed(calls[3])
    assert {(task.kernel.name, task.kernel.key) for task in chosen} == one | cut
    assert len(chosen) == len(one | cut) > len(one)


# ------------------------------------------------------------------------------------------------------------- failures


def test_refused_calls_and_failed_kernels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    calls = [(replace(CALL, dtype="int32"), None), (CALL, None)]
    chosen = tasks(calls, H100, PACKAGE, lambda call, error: refused.append(f"{call.dtype}: {error}"))
    assert len(refused) == 1
    assert refused[0].startswith("int32: ")
    assert {task.call for task in chosen} == {CALL}
    monkeypatch.setattr(compiling, "_launch", lambda *_: {})
    with pytest.raises(RuntimeError, match="did not launch it"):
        compile_task(chosen[0])


def test_report_has_times_failures_and_the_cache() -> None:
    kernels = [Kernel(module="m", name=name, key="") for name in ("slow", "old")]
    outcomes = dict(zip(kernels, [Outcome(seconds=7.26, found=False), Outcome(seconds=0.1, found=True)], strict=True))
    report = Report(outcomes=outcomes, failures=(Failure(what="broken, of causal", reason="no"),), seconds=9.0)
    shown = lines(report, H100, 2)
    assert shown[:3] == ["slow  7.3 s", "old   in the cache", "failed: broken, of causal: no"]
    assert shown[3] == "for h100 (sm_90): 1 kernels compiled, 1 found in the cache, 1 failed; 9 s, 2 processes"
    assert shown[4] == f"in {knobs.cache.dir}"


def test_failure_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failed = Report(outcomes={}, failures=(Failure(what="x", reason="y"),), seconds=1.0)
    monkeypatch.setattr(command, "run", lambda *_: failed)
    assert main(["warm", "causal", "--gpu", "h100"]) == 1
    assert "failed: x: y" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "expected names of variants, or --model CONFIG"),
        (["causl"], "got 'causl'; did you mean 'causal'?"),
        (["causal", "--modes", "dens"], "--modes: expected one of dense, packed, segmented, paged, got 'dens'"),
        (["causal", "--passes", "dq"], "--passes: expected one of fwd, bwd, got 'dq'"),
        (["causal", "--dtypes", "int8"], "--dtypes: expected one of"),
        (["causal", "--layout", "sbhd"], "--layout: expected one of bhsd, bshd, got 'sbhd'"),
        (["causal", "--heads", "5/2"], "--heads: expected query heads that are a multiple of key heads, got 5/2"),
        (["causal", "--head-dims", "1"], "--head-dims: expected 8 to"),
        (["causal", "--head-dims", "192/1"], "--head-dims: expected 8 to 512, got 1"),
        (["causal", "--head-dims", "576/512"], "--head-dims: expected 8 to 512, got 576"),
        (["causal", "--head-dims", "577", "--modes", "paged"], "--head-dims: expected 8 to 576, got 577"),
        (
            ["--model", "nosuch"],
            "--model: expected a config.json, or a folder that holds one, got nosuch, which does not exist",
        ),
        (["causal", "--gpu", "h101"], "--gpu: expected one of"),
        (["causal", "--cache", "float8_e4m3fn"], "--cache: expected only with --modes paged, got --modes dense"),
        (["causal", "--modes", "paged", "--cache", "int8"], "--cache: expected one of float8_e4m3fn, float8_e5m2"),
        (["causal", "--modes", "paged", "--scales", "head"], "--scales: expected only with --cache, got it without"),
    ],
)
def test_bad_input_is_one_error(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = argv if "--gpu" in argv else [*argv, "--gpu", "h100"]
    assert main(["warm", *given]) == 2
    assert message in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- models


def test_model_names_its_variants_and_heads(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="a model's config is read by transformers")
    config = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 128, "head_dim": 32}
    config |= {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    layer = Layer(variant="band_softcap", heads=(4, 2), head_dim=32, head_dim_v=32)
    assert layers_of(tmp_path, "generated") == (layer,)


def test_model_names_the_head_dim_of_its_values(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="a model's config is read by transformers")
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 128}
    config |= {"intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    config |= {"q_lora_rank": 32, "kv_lora_rank": 32}
    config |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert layers_of(tmp_path, "generated") == (Layer(variant="causal", heads=(4, 4), head_dim=48, head_dim_v=32),)
