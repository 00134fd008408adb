"""Export to a Hugging Face folder: `Qwen3ForCausalLM` with a character tokenizer.

model.safetensors config.json generation_config.json tokenizer.json tokenizer_config.json
README.md     the model card
chargpt.json  config, tokenizer and state of the run, for `chargpt import hf`, and a checksum
"""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from chargpt.config import NORM_EPS
from chargpt.errors import ChargptError
from chargpt.export.check import ExportCheck, Logits, write_checked
from chargpt.models.gpt import GPT
from chargpt.store.run import Run
from chargpt.text.display import REPLACEMENT, one_line
from chargpt.text.tokenizer import CharTokenizer

WEIGHTS, ORIGIN = "model.safetensors", "chargpt.json"
MAX_PROMPT_SEARCHED = 10_000  # tokens
QWEN3_NAMES = {  # of modules, by our names
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def export_huggingface(run: Run, folder: Path) -> ExportCheck | None:
    """Write a run's GPT as a folder that `transformers` opens, and check it.

    Raises:
        ConfigError: Qwen3 cannot hold the model.
        OperationError: the export differs from the run.
        OSError: it cannot be written, or the folder exists and is not empty.
    """
    target = "Qwen3, the architecture of this export,"
    return write_checked(
        run, folder, target, write_huggingface, "transformers", TransformersRuntime
    )


def write_huggingface(folder: Path, run: Run, model: GPT) -> None:
    """Write the files of the folder."""
    weights = safetensors.torch.save(qwen3_weights(model), {"format": "pt"})
    origin = {
        "config": run.config.model_dump(mode="json"),
        "tokenizer": run.tokenizer.to_json(),
        "state": run.state.to_json().decode(),
    }
    trees = {
        "config.json": qwen3_config(model),
        "generation_config.json": generation_config(run),
        "tokenizer.json": tokenizer_json(run.tokenizer),
        "tokenizer_config.json": {
            # without it, transformers 5 builds the tokenizer of Qwen2, which has other ids
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            # transformers 4 adds token types, which the model rejects
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": model.block_size,
        },
        ORIGIN: {"sha256": origin_digest(origin, weights), **origin},
    }
    files = {
        WEIGHTS: weights,
        "README.md": model_card(run).encode(),
        **{name: json.dumps(tree, indent=2).encode() for name, tree in trees.items()},
    }
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def origin_digest(origin: Mapping[str, Any], weights: bytes) -> str:
    """Return the SHA-256 of all else in `chargpt.json` and of the weights' file."""
    others = {key: value for key, value in origin.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(others).encode())
    digest.update(weights)
    return digest.hexdigest()


def qwen3_config(model: GPT) -> dict[str, Any]:
    """Return the `Qwen3Config` of a GPT, without what is its default there."""
    config = model.config
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": model.vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "head_dim": config.head_size,
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": config.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
    }


def qwen3_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights of a GPT, on the CPU, under the names of `Qwen3ForCausalLM`."""
    state = model.state_dict().items()
    return {their_name(name, QWEN3_NAMES): tensor.cpu().contiguous() for name, tensor in state}


def their_name(name: str, modules: Mapping[str, str]) -> str:
    """Return another program's name of one of our weights, by its names of `modules`."""
    module, _, kind = name.rpartition(".")
    if module in modules:
        return f"{modules[module]}.{kind}"
    blocks, layer, module = module.split(".", 2)
    return f"{modules[blocks]}.{layer}.{modules[module]}.{kind}"


def generation_config(run: Run) -> dict[str, Any]:
    """Return the settings with which `generate` samples as the run does."""
    sample = run.config.sample
    config: dict[str, Any] = {
        "do_sample": sample.temperature > 0,
        "max_new_tokens": max(1, run.model.block_size // 2),
    }
    if sample.temperature:  # greedy decoding has none of these
        # without a top_k, transformers takes 50
        config |= {"temperature": sample.temperature, "top_k": sample.top_k or 0}
        filters = {"top_p": sample.top_p, "min_p": sample.min_p}
        config |= {name: value for name, value in filters.items() if value is not None}
    if run.tokenizer.eos_token:
        config["eos_token_id"] = run.tokenizer.eos_token_id
    return config


def tokenizer_json(tokenizer: CharTokenizer) -> dict[str, Any]:
    """Return the content of `tokenizer.json`: every character a token, nothing merged."""
    texts = [tokenizer.token_text(id_) for id_ in range(tokenizer.vocab_size)]
    split = None
    model: dict[str, Any] = {"type": "BPE", "merges": [], "byte_fallback": tokenizer.has_bytes}
    if tokenizer.has_unknown:  # a BPE model would join neighbouring unknown characters
        texts[-1] = "<unk>" if REPLACEMENT in tokenizer.characters else REPLACEMENT
        pattern = {"Regex": r"[\s\S]"}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        model = {"type": "WordLevel", "unk_token": texts[-1]}
    return {  # transformers reads each of these keys
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        # without Fuse, tokens are joined with spaces
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {**model, "vocab": {text: id_ for id_, text in enumerate(texts)}},
    }


def model_card(run: Run) -> str:
    """Return the model card, in Markdown."""
    config, state, tokenizer = run.config, run.state, run.tokenizer
    text = one_line(state.text_name).replace("`", "'") or "unknown"
    unit, outside = "characters", "is dropped by the tokenizer"
    if tokenizer.has_bytes:
        unit, outside = "tokens", "is spelled as the bytes of its UTF-8 form"
    elif tokenizer.has_unknown:
        outside = "becomes one unknown token"
    loss = "not measured"
    if state.best_nats_per_char is not None and state.step == state.best_step:
        loss = (
            f"{state.best_nats_per_char:.3f} nats per character on the validation split (at most "
            f"{config.train.evaluation_tokens:,} tokens of this split; protocol `blocks`: "
            "non-overlapping blocks, every character scored once), as measured in training"
        )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [character-level, qwen3]
# license: choose one that the training text allows
---

# A character-level GPT

- Training text: `{text}`
- Size: {run.model.num_parameters():,} parameters; layers {config.model.n_layer}, width \
{config.model.n_embd}, heads {config.model.n_head}
- Context: prompt and continuation together at most {config.model.block_size:,} {unit}
- Vocabulary: {tokenizer.describe()}; any other {outside}
- Loss: {loss}
- Trained {state.step:,} steps with chargpt

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
prompt = tokenizer("{_example_prompt(run)}", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt)[0]))
```
"""


def _example_prompt(run: Run) -> str:
    """Return words of the validation split that need no escaping, or a letter of the vocabulary."""
    with suppress(ChargptError):  # of a run without its text
        text = run.tokenizer.decode(run.corpus().split("val")[:MAX_PROMPT_SEARCHED])
        # words at the start of a line, but the first line may begin within a word
        found = re.search(r"\n([^\W\d_]\w{,11}( \w{,11})?)\b", text)
        if found:
            return found[1]
    return next((c for c in reversed(run.tokenizer.characters) if c.isalpha()), "PROMPT")


class TransformersRuntime:
    """The folder as `transformers` opens it."""

    def __init__(self, folder: Path) -> None:
        import_module("transformers.models.qwen3")  # which old versions lack
        transformers: Any = import_module("transformers")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.name = f"transformers {transformers.__version__}"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Logits:
        found: Logits = self.model(torch.tensor([tokens])).logits[0].numpy()
        return found
