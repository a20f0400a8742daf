"""Fine-tunes a tiny model with TRL's SFTTrainer on packed rows without padding; the ops compute the attention.

    pip install trl
    python -m examples.sft_trl --architecture Gemma2 --steps 20

TRL packs documents by best-fit decreasing and marks where each begins by `position_ids`. After training, the logits
of a batch are compared with the logits of each of its documents alone, computed by transformers' eager attention.
Model, tokenizer and text are made here: nothing is downloaded. On a GPU the model is larger, its rows are longer, and
it runs in bfloat16.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch

from codegen.cli.options import at_least

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "GptOss": {"sliding_window": 32, "num_local_experts": 2, "num_experts_per_tok": 1},
}
"""Models that may be trained, and the fields of their configs in addition to the common size."""

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, the tokens of a row, the documents, and the largest difference of logits, as a share of the largest."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    row: int
    documents: int
    words: int
    tolerance: float


SMALL = Size(layers=2, heads=4, kv_heads=2, head_dim=16, row=128, documents=200, words=90, tolerance=1e-4)
LARGE = Size(layers=8, heads=16, kv_heads=8, head_dim=128, row=8192, documents=6000, words=900, tolerance=3e-2)


def texts(size: Size) -> list[str]:
    """Documents of different lengths: runs of words of Python's documentation."""
    words = " ".join(topics.values()).split()
    lengths = torch.randint(5, size.words, (size.documents,), generator=torch.Generator().manual_seed(0)).tolist()
    found, begin = [], 0
    for length in lengths:
        begin = begin if begin + length <= len(words) else 0
        found.append(" ".join(words[begin : begin + length]))
        begin += length
    return found


def tokenizer(documents: list[str]) -> Any:
    """A token for each of the most frequent words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(documents, trainers.WordLevelTrainer(vocab_size=1000, special_tokens=list(SPECIAL)))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def save_model(architecture: str, size: Size, words: Any, folder: str) -> None:
    """A model of random weights and its tokenizer, as a folder that trainers load."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=len(words),
        hidden_size=size.heads * size.head_dim,
        intermediate_size=2 * size.heads * size.head_dim,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.row,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        initializer_range=0.02 if size is LARGE else 0.2,  # with few channels, so large that attention matters
        **ARCHITECTURES[architecture],
    )
    torch.manual_seed(0)
    getattr(transformers, f"{architecture}ForCausalLM")._from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)


def trainer_of(folder: str, documents: list[str], size: Size, steps: int, out: str) -> Any:
    """TRL's trainer as a user writes it: only the name of the attention is from this package."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    arguments = SFTConfig(
        output_dir=out,
        model_init_kwargs={"attn_implementation": "codegen", "dtype": "bfloat16" if on_gpu else "float32"},
        packing=True,
        packing_strategy="bfd",
        max_length=size.row,
        per_device_train_batch_size=2,
        learning_rate=1e-3 if on_gpu else 5e-3,
        max_steps=steps,
        logging_steps=max(1, steps // 5),
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=on_gpu,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    return SFTTrainer(model=folder, args=arguments, train_dataset=Dataset.from_dict({"text": documents}))


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Differences from the logits of each document alone by eager attention, as a share of the largest logit. `packed`:
    of the packed batch by the ops. `leaking`: of the same batch without the positions where documents begin."""

    packed: float
    leaking: float
    documents: int


def compare_batch(trainer: Any) -> Differences:
    """Compare the logits of the first batch that TRL makes."""
    batch = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.eval()
    ids, positions = batch["input_ids"].to(model.device), batch["position_ids"].to(model.device)
    begins = (positions[0] == 0).nonzero()[:, 0].tolist()
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        leaking = model(input_ids=ids, use_cache=False).logits
        model.set_attn_implementation("eager")
        documents = [ids[:, begin:end] for begin, end in zip(begins, [*begins[1:], ids.shape[1]], strict=True)]
        alone = torch.cat([model(input_ids=each, use_cache=False).logits for each in documents], 1)
    size = alone.abs().max()
    return Differences(
        packed=((packed - alone).abs().max() / size).item(),
        leaking=((leaking - alone).abs().max() / size).item(),
        documents=len(begins),
    )


def main(arguments: list[str] | None = None) -> int:
    """Train, then compare the logits of one batch; 1 if they differ or training does not lower the loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--architecture", choices=sorted(ARCHITECTURES), default="Gemma2", help="model (default: Gemma2)"
    )
    parser.add_argument("--steps", type=at_least(2), default=20, help="training steps (default: 20)")
    args = parser.parse_args(arguments)
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"examples.sft_trl trains by TRL, which cannot be imported ({error}): pip install trl"
        ) from None
    import transformers
    from datasets import disable_progress_bars

    from generated.integrations import transformers as hf

    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    hf.register()
    size = LARGE if torch.cuda.is_available() else SMALL
    documents = texts(size)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as out:
        save_model(args.architecture, size, tokenizer(documents), folder)
        trainer = trainer_of(folder, documents, size, args.steps, out)
        print(hf.explain(trainer.model))
        trainer.train()
        found = compare_batch(trainer)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("losses of training: " + ", ".join(f"{loss:.3f}" for loss in losses))
    print(f"logits of {found.documents} documents: packed they are {found.packed:.1e} from those of each alone,")
    print(f"and {found.leaking:.1e} without where documents begin")
    is_well = found.packed <= size.tolerance < found.leaking and losses[-1] < losses[0]
    print("All is well." if is_well else "Packed documents leak, or training does not lower the loss.")
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
