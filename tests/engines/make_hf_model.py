"""Write a random llama for vLLM, half a million weights, with a tokenizer whose tokens are bytes.

    python tests/engines/make_hf_model.py OUT

Run it with the Python that has vLLM: it takes torch, transformers and tokenizers. Most bytes that it says are half
characters, so that many tokens come without text: a client that counts texts miscounts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 2048
SPECIALS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one of 256 bytes and three specials, which merges nothing."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIALS.values()]
    byte_level = Tokenizer(models.BPE(vocab={piece: k for k, piece in enumerate(pieces)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=byte_level, chat_template=CHAT_TEMPLATE, **SPECIALS)


def model(vocabulary: dict[str, int]) -> LlamaForCausalLM:
    """Return two layers of random weights, the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            bos_token_id=vocabulary[SPECIALS["bos_token"]],
            eos_token_id=vocabulary[SPECIALS["eos_token"]],
        )
    ).to(torch.bfloat16)


def main() -> None:
    """Write both to the folder that the first argument names."""
    out = Path(sys.argv[1])
    words = tokenizer()
    words.save_pretrained(out)
    weights = model(words.get_vocab())
    weights.save_pretrained(out)
    print(f"{out}: {sum(part.numel() for part in weights.parameters())} weights")


if __name__ == "__main__":
    main()
