"""Import: runs from the files of other programs.

A checkpoint of nanoGPT and its `meta.pkl` are pickles, which can run code when they are read, or
ask for any memory. Here they cannot: their opcodes are checked first, nothing that they name is
called, and of a checkpoint only the tensors of the model are read, by the reader that checked it.

Shapes in this file: V = vocabulary size.
"""

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from chargpt.config import Config, validate
from chargpt.device import require_memory
from chargpt.errors import ChargptError, RunError, TextError, reason_of
from chargpt.export.huggingface import ORIGIN, QWEN3_NAMES, WEIGHTS, origin_digest, their_name
from chargpt.files import open_regular, read_json, read_regular, require_new
from chargpt.models import build_model, count_parameters
from chargpt.store.checkpoint import RunState, max_weight_bytes
from chargpt.store.folder import RunFolder
from chargpt.store.tensors import require_weights
from chargpt.text.prepare import prepare
from chargpt.text.source import find_text
from chargpt.text.tokenizer import CharTokenizer

MAX_FILE_BYTES = 64_000_000  # of settings and vocabulary
# of a pickle of dicts, strings and integers
PLAIN_OPCODES = set(
    "PROTO FRAME STOP MARK EMPTY_DICT DICT SETITEM SETITEMS MEMOIZE PUT BINPUT LONG_BINPUT GET "
    "BINGET LONG_BINGET INT BININT BININT1 BININT2 UNICODE SHORT_BINUNICODE BINUNICODE".split()
)
# of tuples, lists, numbers and tensors as well
CHECKPOINT_OPCODES = PLAIN_OPCODES | set(
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS NONE NEWTRUE NEWFALSE LONG1 "
    "BINFLOAT GLOBAL REDUCE BUILD BINPERSID".split()
)
# of a pickle: one byte makes an empty dict of 64, and hashing more tuples, each in the next, could
# overflow the stack
MAX_CONTAINERS = 20_000
STORAGES = {  # PyTorch's classes
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "BoolStorage": torch.bool,
}
MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "dropout")
NANOGPT_NAMES = {  # as QWEN3_NAMES
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def import_huggingface(folder: Path, out: Path) -> Path:
    """Make a run of a folder that `export_huggingface` wrote; return the run's folder.

    The run has the weights, settings and progress of the one exported, and no optimizer state.

    Raises:
        ChargptError: the folder is not such an export, or `out` is in use.
        OSError: the run cannot be written.
    """
    require_new(out)
    with _report_damage(folder, "a folder that `chargpt export hf` wrote"):
        path, origin = folder / WEIGHTS, read_json(folder / ORIGIN, MAX_FILE_BYTES)
        config = validate(origin["config"], str(folder / ORIGIN))
        if config.model.kind != "gpt":
            raise ValueError("it holds no GPT")
        tokenizer = CharTokenizer.from_json(origin["tokenizer"], str(folder / ORIGIN))
        state = replace(RunState.from_json(origin["state"].encode()), corpus_key=None)  # no text
        if state.best_step not in (None, state.step):  # another checkpoint than the best
            state = replace(state, best_step=None, best_nats_per_char=None)
        limit = max_weight_bytes(config.model, tokenizer.vocab_size)
        require_memory(2 * min(limit, path.lstat().st_size), str(path))  # bytes, and then tensors
        content = read_regular(path, limit)
        digest = origin_digest(origin, content)
        if origin.get("sha256", digest) != digest:  # exports of earlier versions have none
            raise RunError(
                f"{path} or {ORIGIN} beside it has changed since the export; export the run again, "
                f'or delete the line "sha256" of {ORIGIN} to import them as they are'
            )
        theirs = load_safetensors(content)
        weights = our_weights(theirs, QWEN3_NAMES, config, tokenizer.vocab_size, folder)
    with RunFolder(out).locked(is_new=True) as run:
        run.create(config, tokenizer)
        run.save(config=config, tokenizer=tokenizer, state=state, model=weights, optimizer={})
    return out


def import_nanogpt(checkpoint: Path, meta: Path, out: Path, text: Path | None = None) -> Path:
    """Make a run of a checkpoint; return the run's folder.

    Args:
        checkpoint: `ckpt.pt`, as nanoGPT's training writes it.
        meta: `meta.pkl`, as its preparation of a character-level text writes it.
        out: folder of the run.
        text: that the model was trained on, for evaluation without naming it; its last tenth is the
            validation split, as nanoGPT has it.

    Raises:
        ChargptError: a file is not what it should be, or the folder is in use.
        OSError: the run cannot be written.
    """
    require_new(out)
    with _report_damage(meta, "the meta.pkl of a character-level nanoGPT"):
        tokenizer, order = read_meta(meta)
    with _report_damage(checkpoint, "the ckpt.pt of a character-level nanoGPT"):
        saved = read_checkpoint(checkpoint)
        config, state = convert_settings(saved, len(order), checkpoint)
        theirs = nanogpt_weights(saved["model"])
        weights = our_weights(theirs, NANOGPT_NAMES, config, len(order), checkpoint)
        weights["embedding.weight"] = weights["embedding.weight"][order]
    with RunFolder(out).locked(is_new=True) as folder:
        prepared = None
        if text is not None:
            values = {"text.path": str(text.absolute()), "text.rare": "keep"}  # as nanoGPT does
            if not {*"\r\u2028\u2029"} & {*tokenizer.characters}:  # it reads CR LF as LF
                values["text.newlines"] = "lf"
            config = config.with_values(values)
            corpus = prepare(find_text(config.text), config.text, folder.new_text)
            if corpus.tokenizer.characters != tokenizer.characters:
                different = set(corpus.tokenizer.characters) ^ set(tokenizer.characters)
                raise TextError(
                    f"{text} and {meta} have different characters, such as {min(different)!r}; "
                    "name the text of the model"
                )
            state = replace(state, corpus_key=corpus.key, text_name=corpus.name)
            prepared, tokenizer = corpus.folder, corpus.tokenizer
        folder.create(config, tokenizer, prepared)
        folder.save(config=config, tokenizer=tokenizer, state=state, model=weights, optimizer={})
    return out


@contextmanager
def _report_damage(path: Path, what: str) -> Iterator[None]:
    """Report whatever a damaged file makes the block raise as a RunError that names the file."""
    try:
        yield
    except ChargptError:
        raise
    except Exception as error:  # a damaged pickle may raise any
        cause = reason_of(error)
        raise RunError(f"{path} is not {what} ({cause:.160}); name another") from None


def our_weights(
    theirs: Mapping[str, Tensor],
    names: Mapping[str, str],
    config: Config,
    vocab_size: int,
    origin: Path,
) -> dict[str, Tensor]:
    """Return weights under our names, in float32, with biases of 0 where there are none.

    Args:
        theirs: the weights under the names of another program.
        names: of that program, as in `their_name`.
        config: of the run.
        vocab_size: V.
        origin: path of the weights.

    Raises:
        RunError: names or shapes are not those of the config, or a value is not finite.
    """
    with torch.device("meta"):
        model = build_model(config.model, vocab_size)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    ours = {their_name(name, names): name for name in shapes}
    biases = {name: torch.zeros(shape) for name, shape in shapes.items() if name.endswith(".bias")}
    weights = biases | {ours.get(name, name): tensor for name, tensor in theirs.items()}
    require_weights(model, weights, origin)
    # a sparse tensor has no contiguous form
    return {name: tensor.float().contiguous() for name, tensor in weights.items()}


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that is not read yet."""

    dtype: torch.dtype
    key: str  # of its storage, the name of an entry of the archive
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class StateDict(dict[str, Any]):
    """Stands for an OrderedDict, whose attributes are left out."""

    def __setstate__(self, state: object) -> None: ...


class Unpickler(pickle.Unpickler):
    """Calls nothing but the two stand-ins of this module; `read_pickle` has checked the opcodes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return StateDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, *rest: StoredTensor(*storage, *rest[:3])
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str]:
        """Return dtype and key of a storage."""
        _, dtype, key, _, _ = pid
        return dtype, key


def read_pickle(content: bytes, opcodes: Collection[str]) -> Any:
    """Return what a pickle contains; an error if it has other opcodes."""
    n_containers = 0
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in opcodes:
            raise ValueError(f"it contains {opcode.name}")
        n_containers += opcode.name.startswith(("TUPLE", "EMPTY_", "DICT"))
        if n_containers > MAX_CONTAINERS:
            raise ValueError(f"it contains over {MAX_CONTAINERS:,} tuples, lists and dicts")
        if opcode.name.endswith("PUT") and int(argument or 0) > len(content):
            raise ValueError("it asks for more memory than it needs")  # a table of that size
    return Unpickler(io.BytesIO(content)).load()


def read_meta(path: Path) -> tuple[CharTokenizer, Tensor]:
    """Return the tokenizer of a `meta.pkl`, and the ids there of its characters, (V,)."""
    content = read_regular(path, MAX_FILE_BYTES)
    itos = read_pickle(content, PLAIN_OPCODES)["itos"]
    ids = {character: id_ for id_, character in itos.items()}
    characters = "".join(sorted(ids))
    if set(map(len, ids)) != {1} or sorted(itos) != list(range(len(characters))):
        raise ValueError("its `itos` does not number different characters from 0 on")
    characters.encode()  # no surrogates
    order = torch.tensor([ids[character] for character in characters], dtype=torch.int64)
    return CharTokenizer(characters), order


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint contains besides its optimizer, with the tensors of its model."""
    size = path.lstat().st_size
    require_memory(2 * size, str(path))  # its tensors as they are, and in float32
    with open_regular(path, size) as file, zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("it is compressed")
        (name,) = (each.filename for each in entries if each.filename.endswith("/data.pkl"))
        if archive.getinfo(name).file_size > MAX_FILE_BYTES:
            raise ValueError(f"its pickle is larger than {MAX_FILE_BYTES:,} bytes")
        saved: dict[str, Any] = read_pickle(archive.read(name), CHECKPOINT_OPCODES)
        folder = name.removesuffix("data.pkl")

        @cache
        def storage(dtype: torch.dtype, key: str) -> Tensor:
            return torch.frombuffer(bytearray(archive.read(f"{folder}data/{key}")), dtype=dtype)

        def load(value: Any) -> Any:
            if not isinstance(value, StoredTensor):
                return value
            dtype, key, offset, shape, stride = value
            return storage(dtype, key).as_strided(shape, stride, offset)

        model = {name: load(each) for name, each in saved["model"].items()}
        return {**saved, "model": model, "best_val_loss": load(saved["best_val_loss"])}


def convert_settings(saved: dict[str, Any], vocab_size: int, path: Path) -> tuple[Config, RunState]:
    """Return config and state of a checkpoint, for V = `vocab_size`."""
    args, step, dataset = saved["model_args"], saved["iter_num"], saved["config"]["dataset"]
    numbers = [*(args[key] for key in (*MODEL_ARGS, "vocab_size")), step]
    # whatever else they are, converting or printing it could cost any time and memory
    if any(type(number) not in (int, float) for number in numbers) or type(dataset) is not str:
        raise ValueError("a setting has the wrong type")
    model = {"kind": "gpt2", **{key: args[key] for key in MODEL_ARGS}}
    step, loss = int(step), float(saved["best_val_loss"])
    best = loss if 0 <= loss < math.inf else None
    tree = {"model": model, "train": {"max_steps": max(1, step)}, "text": {"documents": None}}
    config = validate(tree, str(path))
    if args["vocab_size"] != vocab_size:
        raise ValueError(f"it has {args['vocab_size']} tokens, and meta.pkl {vocab_size}")
    if 2 * count_parameters(config.model, vocab_size) > path.stat().st_size:
        raise ValueError("it is too small for the sizes that it states")
    return config, RunState(step, best_step=step, best_nats_per_char=best, text_name=dataset[:80])


def nanogpt_weights(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, without those that are stored twice or computed."""
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in saved.items()}
    for name, tensor in weights.items():  # before any is read: one number may stand for many
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"its {name:.60} repeats a number")
    if not torch.equal(weights.pop("lm_head.weight"), weights["transformer.wte.weight"]):
        raise ValueError("its output head is not its embedding")
    # the causal mask of old checkpoints
    return {name: each for name, each in weights.items() if not name.endswith(".attn.bias")}
