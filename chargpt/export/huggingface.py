"""Export to a Hugging Face folder, and back: `Qwen3ForCausalLM` with a character tokenizer.

model.safetensors config.json generation_config.json tokenizer.json tokenizer_config.json
README.md     the model card
chargpt.json  config, tokenizer and state of the run, for the way back
"""

import json
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from chargpt.config import NORM_EPS, Config, validate
from chargpt.device import require_memory
from chargpt.errors import ChargptError, OperationError, RunError
from chargpt.export.check import (
    ExportCheck,
    Logits,
    ModelRuntime,
    check_export,
    exportable_model,
    look_up,
    temporary_export,
)
from chargpt.files import read_json, read_regular, require_new, write_synced
from chargpt.models import GPT, build_model, count_parameters, rotary_bytes
from chargpt.store.checkpoint import max_weight_bytes
from chargpt.store.folder import RunFolder
from chargpt.store.run import Run
from chargpt.store.state import RunState
from chargpt.store.tensors import load_weights
from chargpt.text.display import REPLACEMENT
from chargpt.text.tokenizer import CharTokenizer

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
ORIGIN = "chargpt.json"
MAX_JSON_BYTES = 64_000_000
MAX_PROMPT = 24  # characters of the model card's prompt
MAX_PROMPT_SEARCHED = 10_000  # tokens
ESCAPED = f'"\\`{REPLACEMENT}'  # what the model card's prompt must not hold
# our names of a layer's weights, and those of transformers
LAYER_NAMES = {
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
OTHER_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def export_huggingface(run: Run, folder: Path) -> ExportCheck:
    """Write a run as a folder that `transformers` opens, and check it.

    Args:
        run: of a GPT.
        folder: must not exist.

    Raises:
        ConfigError: the folder exists, or Qwen3 cannot hold the model.
        OperationError: the export does not read back as the run.
        OSError: it cannot be written.
    """
    require_new(folder)
    model = exportable_model(run, "Qwen3, the architecture of this export,")
    with temporary_export(folder) as temporary:
        temporary.mkdir()
        for name, content in files(run, model).items():
            write_synced(temporary / name, [content])
        return check_export(run, _open_runtime(temporary))


def files(run: Run, model: GPT) -> dict[str, bytes]:
    """Return the content of each file of the folder."""
    tokenizer = run.tokenizer
    temperature = run.config.sample.temperature
    generation = {
        "do_sample": temperature > 0,
        **({"temperature": temperature} if temperature else {}),  # greedy decoding has none
        "max_new_tokens": max(1, model.block_size // 2),
    }
    if tokenizer.eos_token:
        generation["eos_token_id"] = tokenizer.eos_token_id
    origin = {
        "config": run.config.model_dump(mode="json"),
        "tokenizer": tokenizer.to_json(),
        "state": run.state.to_json().decode(),
    }
    trees = {
        CONFIG: qwen3_config(model),
        "generation_config.json": generation,
        TOKENIZER: tokenizer_json(tokenizer),
        "tokenizer_config.json": {
            # without it, transformers 5 builds the tokenizer of Qwen2, which has other ids
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            # transformers 4 adds token types, which the model rejects
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": model.block_size,
        },
        ORIGIN: origin,
    }
    weights = {name: tensor.cpu().contiguous() for name, tensor in qwen3_weights(model).items()}
    return {
        WEIGHTS: safetensors.torch.save(weights, {"format": "pt"}),
        "README.md": model_card(run).encode(),
        **{name: json.dumps(tree, indent=2).encode() for name, tree in trees.items()},
    }


def qwen3_config(model: GPT) -> dict[str, Any]:
    """Return the `Qwen3Config` of a GPT."""
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
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",  # read by transformers 4
        "dtype": "float32",
    }


def qwen3_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights of a GPT under the names of `Qwen3ForCausalLM`."""
    return {_their_name(name): tensor for name, tensor in model.state_dict().items()}


def _their_name(name: str) -> str:
    """Return the name in transformers of one of our weights."""
    prefix = name.removesuffix(".weight")
    if prefix in OTHER_NAMES:
        return f"{OTHER_NAMES[prefix]}.weight"
    _, layer, rest = prefix.split(".", 2)
    return f"model.layers.{layer}.{LAYER_NAMES[rest]}.weight"


def tokenizer_json(tokenizer: CharTokenizer) -> dict[str, Any]:
    """Return the content of `tokenizer.json`: every character a token, nothing merged.

    The decoder joins tokens; without it they are joined with spaces.
    """
    vocabulary = {character: id_ for id_, character in enumerate(tokenizer.characters)}
    tree: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
    }
    if tokenizer.has_unknown:  # a BPE model would join neighbouring unknown characters
        unknown = "<unk>" if REPLACEMENT in tokenizer.characters else REPLACEMENT
        vocabulary[unknown] = len(tokenizer.characters)
        split = {"pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        model: dict[str, Any] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": unknown}
        return {**tree, "pre_tokenizer": {"type": "Split", **split}, "model": model}
    for id_ in range(len(tokenizer.characters), tokenizer.vocab_size):
        vocabulary[tokenizer.token_text(id_)] = id_
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": tokenizer.has_bytes,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [],
    }
    if tokenizer.has_bytes:
        decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}]
        tree["decoder"] = {"type": "Sequence", "decoders": decoders}
    return {**tree, "model": model}


def model_card(run: Run) -> str:
    """Return the model card, in Markdown."""
    state, config, model = run.state, run.config, run.model
    loss = "not measured"
    order = "the text, at its end"
    if config.text.documents:
        order = "the documents, which are shuffled"
    elif config.text.test_fraction:
        order = "the text, before the test split"
    if state.best_nats_per_char is not None and state.step == state.best_step:
        loss = (
            f"{state.best_nats_per_char:.3f} nats per character on the validation split ("
            f"{config.text.val_fraction:.0%} of {order}; at most "
            f"{config.train.evaluation_tokens:,} tokens of this split; protocol `blocks`: "
            "non-overlapping blocks, every character scored once), as measured in training"
        )
    outside = (
        "any other is spelled as the bytes of its UTF-8 form"
        if run.tokenizer.has_bytes
        else "any other becomes one unknown token"
        if run.tokenizer.has_unknown
        else "any other is dropped by the tokenizer"
    )
    unit = "tokens" if run.tokenizer.has_bytes else "characters"
    text = " ".join(state.text_name.split()).replace("`", "'") or "unknown"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [character-level, qwen3]
# license: choose one that the training text allows
---

# A character-level GPT

- Training text: `{text}`
- Size: {model.num_parameters():,} parameters; layers {config.model.n_layer}, width \
{config.model.n_embd}, heads {config.model.n_head}
- Context: prompt and continuation together at most {config.model.block_size:,} {unit}
- Vocabulary: {run.tokenizer.describe()}; {outside}
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
    """Return words of the validation split that need no escaping, or else characters.

    Without its text they are of the vocabulary, of its main script.
    """
    with suppress(ChargptError):
        text = run.tokenizer.decode(run.corpus().split("val")[:MAX_PROMPT_SEARCHED])
        for line in text.splitlines()[1:]:  # the first may begin within a word
            words = " ".join(line.split()[:2])[:MAX_PROMPT]
            if words[:1].isalpha() and words.isprintable() and not set(words) & set(ESCAPED):
                return words
    tokenizer = run.tokenizer
    plain = [c for c in tokenizer.characters if c.isprintable() and c not in ESCAPED + " "]
    letters = sorted(c for c in plain if c.isalpha()) or plain
    middle = len(letters) // 2  # where a foreign word or two of a text are not
    if set("The ") <= set(tokenizer.characters) and letters[middle].isascii():
        return "The "
    return "".join(letters[middle : middle + 3]) or "PROMPT"


# -- reading ---------------------------------------------------------------------------------


def _open_runtime(folder: Path) -> "TransformersRuntime | OwnRuntime":
    is_installed = find_spec("transformers") and find_spec("transformers.models.qwen3")
    return TransformersRuntime(folder) if is_installed else OwnRuntime(folder)


class TransformersRuntime:
    """The folder as `transformers` opens it."""

    def __init__(self, folder: Path) -> None:
        transformers: Any = import_module("transformers")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.name = f"transformers {transformers.__version__}"
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # of whatever kind: it is the answer to whether they open it
            cause = " ".join(str(error).split())
            raise OperationError(f"{self.name} cannot open the export ({cause:.200})") from None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def logits(self, tokens: list[int]) -> Logits:
        with torch.inference_mode():
            found: Logits = self.model(torch.tensor([tokens])).logits[0].numpy()
        return found

    def greedy(self, tokens: list[int], length: int) -> list[int]:
        prompt = torch.tensor([tokens])
        with torch.inference_mode():
            ids = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=length,
                do_sample=False,
                temperature=None,
                eos_token_id=-1,  # no token ends the text
            )
        found: list[int] = ids[0, len(tokens) :].tolist()
        return found


class OwnRuntime(ModelRuntime):
    """The folder as `import_huggingface` opens it, and its tokenizer file.

    That is opened by `tokenizers`, or else its vocabulary is looked up.
    """

    def __init__(self, folder: Path) -> None:
        self.name = "chargpt's own runtime (install transformers to check with it)"
        *_, self.model = read_folder(folder)
        self.tokenizer: Any = None
        if find_spec("tokenizers"):
            self.name = f"tokenizers and {self.name}"
            self.tokenizer = import_module("tokenizers").Tokenizer.from_file(
                str(folder / TOKENIZER)
            )
        tree = read_json(folder / TOKENIZER, MAX_JSON_BYTES)["model"]
        self.vocabulary, self.unknown = tree["vocab"], tree["unk_token"]

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return look_up(text, self.vocabulary, self.unknown)
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


def read_folder(folder: Path) -> tuple[Config, CharTokenizer, RunState, GPT]:
    """Return config, tokenizer, state and model of a folder that `export_huggingface` wrote."""
    path = folder / ORIGIN
    try:
        origin = read_json(path, MAX_JSON_BYTES)
        config = validate(origin["config"], str(path))
        tokenizer = CharTokenizer.from_json(origin["tokenizer"], str(path))
        state = RunState.from_json(origin["state"].encode())
        if config.model.kind != "gpt":
            raise ValueError("it holds no GPT")
        # all that the settings allow, but no more than there is to read
        limit = max_weight_bytes(config.model, tokenizer.vocab_size)
        size = min(limit, (folder / WEIGHTS).lstat().st_size)
        require_memory(2 * size + rotary_bytes(config.model), "the model")
        tensors = safetensors.torch.load(read_regular(folder / WEIGHTS, limit))
        n_weights = sum(tensor.numel() for tensor in tensors.values())
        # before memory is taken for the model
        if n_weights != count_parameters(config.model, tokenizer.vocab_size):
            raise ValueError(f"its settings do not match its {n_weights:,} weights")
    except (
        *(KeyError, AttributeError, TypeError, ValueError, OSError),
        safetensors.SafetensorError,
    ) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"{folder} is not a folder that `chargpt export hf` wrote ({cause:.200}); name another"
        ) from None
    model = build_model(config.model, tokenizer.vocab_size)
    assert isinstance(model, GPT)
    model.first_continuation_id = tokenizer.first_continuation_id
    ours = {_their_name(name): name for name in model.state_dict()}
    load_weights(model, {ours.get(name, name): tensor for name, tensor in tensors.items()}, folder)
    return config, tokenizer, state, model.eval()


def import_huggingface(folder: Path, out: Path) -> Path:
    """Make a run of a folder that `export_huggingface` wrote; return the run's folder.

    The run has the weights, settings and progress of the one exported, and no optimizer state.

    Raises:
        ChargptError: the folder is not such an export, or `out` is in use.
        OSError: the run cannot be written.
    """
    require_new(out)
    config, tokenizer, state, model = read_folder(folder)
    with RunFolder(out).locked(is_new=True) as run:
        run.create_from_weights(config, tokenizer, state, model.state_dict())
    return out
