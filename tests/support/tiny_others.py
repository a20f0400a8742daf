"""Tiny random models of transformers other than causal language models: encoders, encoder-decoders and vision."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.tiny_models import SIZE, WINDOW
from tests.support.tiny_runs import padding, tokens

BERT = {**SIZE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": 99, "d_model": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4, "d_ff": 64, "dropout_rate": 0.0}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
SPEECH = {
    "vocab_size": 99,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
BART = {**SPEECH, "max_position_embeddings": 64}
TEXT = {"input_ids": tokens(), "attention_mask": padding("right")}
PAIRS = {**TEXT, "decoder_input_ids": tokens(2, 9)}
IMAGES = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))}

OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Bert": ("BertForMaskedLM", BERT, TEXT),
    "Roberta": ("RobertaForMaskedLM", BERT, TEXT),
    "Electra": ("ElectraForMaskedLM", BERT, TEXT),
    "ModernBert": ("ModernBertForMaskedLM", {**SIZE, "local_attention": WINDOW, "global_attn_every_n_layers": 2}, TEXT),
    "T5": ("T5ForConditionalGeneration", T5, PAIRS),
    "MT5": ("MT5ForConditionalGeneration", T5, PAIRS),
    "UMT5": ("UMT5ForConditionalGeneration", T5, PAIRS),
    "Bart": ("BartForConditionalGeneration", BART, PAIRS),
    "MBart": ("MBartForConditionalGeneration", BART, PAIRS),
    "Marian": ("MarianMTModel", BART, PAIRS),
    "Pegasus": ("PegasusForConditionalGeneration", BART, PAIRS),
    "Whisper": (
        "WhisperForConditionalGeneration",
        SPEECH,
        {"input_features": torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32), "decoder_input_ids": tokens(2, 9)},
    ),
    "ViT": ("ViTForImageClassification", VISION, IMAGES),
    "Deit": ("DeiTForImageClassification", VISION, IMAGES),
    "Dinov2": ("Dinov2ForImageClassification", VISION, IMAGES),
    # Its own weights are so large that a gain would amplify float32 rounding too much.
    "Siglip": ("SiglipForImageClassification", {"vision_config": VISION, "gain": 1.0}, IMAGES),
}
"""The class of a model, the fields of its config, and the arguments of its call."""
