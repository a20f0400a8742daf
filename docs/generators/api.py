"""Pages of the rendered package: each op of torch and JAX, the modules, packing, schedules and `jax_nn`.

mkdocstrings reads signatures and docstrings from the source; nothing of the package is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.load.spec_file import load
from codegen.spec.model import Variant
from codegen.spec.symbols import function_symbol
from docs.generators import ROOT
from docs.generators.markdown import code, fence, page, table
from docs.generators.signatures import keywords_of

SPEC = "variants.yaml"


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One set of ops: its folder in the reference, its name, and its introduction."""

    folder: str
    name: str
    text: str


FRAMEWORKS = (
    Framework(
        folder="torch",
        name="PyTorch",
        text="""`from generated.torch import causal`, or `from attention_codegen.torch import causal` where the
package is installed. Each variant is a function. All take the arguments of [`causal`](causal.md); a variant adds its
own tensors and scalars, and `sink`, `g`, `dropout_p` and `seed` where its entry asks for them. What calls have in
common is in [calls](../calls.md).""",
    ),
    Framework(
        folder="jax",
        name="JAX",
        text="""`from generated.jax import causal`, or `from attention_codegen.jax import causal` where the package is
installed. The arguments are those of the [torch ops](../torch/index.md); the default layout is `[B, S, H, D]`. What
differs is in [calls](../calls.md#in-jax).""",
    ),
)

MODULE_OPTIONS = """    options:
      heading_level: 2
      show_bases: false
      members: [__init__]
      # Trained tensors are documented as parameters; they are attributes, not arguments of the constructor.
      docstring_options: {warn_unknown_params: false, warn_missing_types: false}
"""
OBJECTS = "    options:\n      heading_level: 2\n      show_root_heading: true\n"


def pages() -> dict[str, str | bytes]:
    variants = list(load(ROOT / SPEC).variants.values())
    found: dict[str, str | bytes] = {}
    for framework in FRAMEWORKS:
        folder = f"reference/{framework.folder}"
        listing = table(["op", "what it computes"], [[f"[{code(v.name)}]({v.name}.md)", v.doc] for v in variants])
        title = f"Ops for {framework.name}"
        found[f"{folder}/index.md"] = f"---\ntitle: {title}\n---\n" + page(title, framework.text, listing)
        for variant in variants:
            found[f"{folder}/{variant.name}.md"] = _op(variant, framework)
    found["reference/modules.md"] = _modules(variants)
    return found


def _op(variant: Variant, framework: Framework) -> str:
    """The page of one op. Its entry in the navigation is the variant's name."""
    module = f"generated.{variant.name}.{framework.folder}_op"
    links = ", ".join(
        f"[`{name}`](../../../generated/{variant.name}/{name})"
        for name in ("portable.py", "hopper_fwd.py", "hopper_bwd.py")
    )
    symbol = function_symbol(variant.name)
    # The pages of ops are alike, so the search ranks them below the pages of the language and of calls.
    return "---\nsearch: {boost: 0.3}\n---\n" + page(
        variant.name,
        f"`from generated.{framework.folder} import {variant.name}`. Portable kernels: {links}. The entry:",
        fence(variant.entry, "yaml"),
        f"::: {module}.{symbol}\n{OBJECTS}",
        *_beside(variant, module, "schedule", "makes [a block table](../../how-to/schedules.md) for several calls."),
        *(
            []
            if variant.dropout
            else _beside(variant, module, "plan", "prepares [paged calls](../../how-to/decode.md).")
        ),
        f"## {variant.name}.backward",
        f"`{variant.name}.backward(do, q, k, v, o, lse, ...)` computes gradients of a call whose results are known: "
        "[calls](../calls.md#the-backward-by-itself).",
    )


def _beside(variant: Variant, module: str, name: str, text: str) -> list[str]:
    """The section of a function that an op has as an attribute."""
    options = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    read = ", ".join(code(each) for each in keywords_of(source, f"_{name}"))
    return [
        f"## {variant.name}.{name}",
        f"`{variant.name}.{name}(q, k, v, ...)` {text} It takes all keywords of the op, and reads {read}.",
        f"::: {module}._{name}\n{options}",
    ]


def _modules(variants: list[Variant]) -> str:
    text = """`generated.torch.nn` has each variant as a `torch.nn.Module` that holds what it trains:
`nn.Alibi(heads=8)(q, k, v)`, `nn.GptOss(heads=8)`, `nn.Window(size=256)`. Scalars are arguments of the constructor,
as are the sizes of trained tensors. Parameters start at the entry's `example`, else at zero. Tensors that are not
trained, such as document ids, are arguments of the call."""
    classes = [
        f"::: generated.{variant.name}.torch_op.{_class_name(variant.name)}\n{MODULE_OPTIONS}" for variant in variants
    ]
    return page("torch.nn modules", text, *classes)


def _class_name(variant: str) -> str:
    """The name of a variant's class, as its module spells it."""
    source = (ROOT / "generated" / variant / "torch_op.py").read_text(encoding="utf-8")
    return source.split("\nclass ", 1)[1].split("(", 1)[0]
