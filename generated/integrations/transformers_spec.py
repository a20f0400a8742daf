# SPDX-License-Identifier: Apache-2.0
"""The spec of a model's attention, made from its config alone: no weights are loaded and none are made.

`python -m codegen render --from-config config.json --out gemma2` calls it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers

from .._runtime.core.checks import fail
from .transformers import explain
from .transformers_explain import Explanation, spec_text

__all__ = ["spec_of"]


def spec_of(path: str | os.PathLike[str]) -> str:
    """A spec with a variant for each attention of a model, in training and inference; windows and caps are constants.

    The model is built without memory, on torch's meta device, and called with eight tokens or an image, as `explain`
    calls it. Attention that a model computes only for other inputs, such as images beside text, is missing: for such
    inputs load the model and use `explain(model, **inputs).spec()`.

    Args:
        path: a `config.json` of transformers, or the folder that holds it.

    Raises:
        ArgumentError: the model cannot be served, or cannot be called in this way; the message says what to do.
        OSError, ValueError: the path holds no config of a model that the installed transformers has.
    """
    return spec_text(explained(path))


def explained(path: str | os.PathLike[str]) -> list[Explanation]:
    """What computes each layer of a model, from its config: in eval mode, then in training. Raises as `spec_of`."""
    # Read nothing from the hub, and never run code that comes with a model.
    config = transformers.AutoConfig.from_pretrained(os.fspath(path), local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = _class(config)(config).to(torch.bfloat16)
        try:
            return [explain(model.eval()), explain(model.train())]
        except (RuntimeError, AttributeError) as error:
            reason = str(error).partition("\n")[0]
            way = "load the model, and write explain(model, **inputs).spec() into a file"
            fail("spec_of", "path", f"a model that runs on eight tokens without weights: {way}", reason)


def _class(config: Any) -> Any:
    """The class that the config names, or else the model without a head."""
    names = getattr(config, "architectures", None) or []
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    return found or transformers.AutoModel.from_config
