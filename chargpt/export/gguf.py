"""Export to a GGUF file, which llama.cpp and the programs around it open: architecture `qwen3`.

The tokenizer is of SentencePiece's kind ("llama"): every character is a token of its own, nothing
is merged, and byte tokens, if the run has them, spell characters outside the vocabulary.
"""

from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from chargpt import __version__
from chargpt.config import NORM_EPS
from chargpt.errors import ConfigError
from chargpt.export.check import ExportCheck, Logits, max_prompt_tokens, write_checked
from chargpt.export.huggingface import qwen3_weights
from chargpt.files import write_atomically
from chargpt.models.gpt import GPT
from chargpt.store.run import Run
from chargpt.text.display import display_text
from chargpt.text.tokenizer import CharTokenizer

Precision = Literal["f32", "f16", "q8_0"]
Q8_BLOCK = 32  # weights of a row that share a scale
SPACE = "\u2581"  # stands for a space in SentencePiece
END = "<|endoftext|>"  # a token that llama.cpp requires, with weights 0; it is never sampled
MAX_DIVERGENCE = 0.005  # in nats, by rounding the weights
SECONDS = 120  # at most, of a request to llama.cpp


def export_gguf(
    run: Run, path: Path, precision: Precision = "f32", *, force: bool | None = None
) -> ExportCheck | None:
    """Write a run's GPT as a GGUF file, with a Modelfile for Ollama beside it, and check it.

    Args:
        run: of a GPT.
        path: of the file; `modelfile_path` returns that of the other.
        precision: of the matrices; norms are float32.
        force: replace files at these paths.

    Raises:
        ConfigError: the package to write it is missing, GGUF cannot hold the model, or a file is
            there.
        OperationError: the export differs from the run.
        OSError: it cannot be written.
    """
    tokenizer, config = run.tokenizer, run.config.model
    if tokenizer.has_unknown:
        raise ConfigError(
            "GGUF has no unknown token for characters; export a run that was trained with "
            "text.rare=bytes or keep"
        )
    if SPACE in tokenizer.characters:
        raise ConfigError(
            f"GGUF takes the character {SPACE} (U+2581) for a space, and the vocabulary has it; "
            "train on a text without it"
        )
    for key, size in (("n_embd", config.n_embd), ("n_inner", config.mlp_width)):
        if precision == "q8_0" and size % Q8_BLOCK:
            raise ConfigError(
                f"q8_0 needs sizes that are multiples of {Q8_BLOCK}, and the model's {key} is "
                f"{size}; use f16"
            )
    check = write_checked(
        run,
        path,
        "GGUF",
        partial(write_gguf, precision=precision),
        "xllamacpp",
        partial(LlamaRuntime, n_ctx=max_prompt_tokens(run) + 1),
        None if precision == "f32" else MAX_DIVERGENCE,
        force=force,
    )
    content = modelfile_text(path.name, config.block_size, run.config.sample.temperature)
    write_atomically(modelfile_path(path), content.encode(errors="surrogateescape"), force=force)
    return check


def write_gguf(path: Path, run: Run, model: GPT, precision: Precision) -> None:
    """Write a model as a GGUF file."""
    gguf: Any = import_module("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name(display_text(run.folder.absolute().name, keep_spaces=True))
    writer.add_description(f"character-level GPT by chargpt {__version__}")
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_rope_freq_base(config.rope_theta)
    scope = "ALL" if precision == "f32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{scope}_{precision.upper()}"])
    _add_tokenizer(writer, run.tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.n_layer)
    for name, tensor in qwen3_weights(model).items():
        weight = tensor.float().numpy()
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            weight = np.pad(weight, ((0, 1), (0, 0)))  # the row of END
        kind = gguf.GGMLQuantizationType[precision.upper() if weight.ndim == 2 else "F32"]
        their_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(their_name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: CharTokenizer) -> None:
    """Add the text and the type of every token, END the last."""
    kinds: Any = import_module("gguf").TokenType
    end, texts = tokenizer.vocab_size, map(tokenizer.token_text, range(tokenizer.vocab_size))
    # the text of a token cannot hold a null character
    pieces = [{" ": SPACE, "\0": "<0x00>"}.get(text, text) for text in texts]
    types = [kinds.NORMAL if len(piece) == 1 else kinds.BYTE for piece in pieces]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*pieces, END])
    writer.add_token_scores([0.0] * (end + 1))
    writer.add_token_types([*types, kinds.CONTROL])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(tokenizer.eos_token_id if tokenizer.eos_token else end)
    writer.add_unk_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_array("tokenizer.ggml.suppress_tokens", [end])


def modelfile_path(path: Path) -> Path:
    """Return the path of the Modelfile beside a GGUF file."""
    return path.with_name(f"{path.name}.Modelfile")


def modelfile_text(name: str, block_size: int, temperature: float) -> str:
    """Return a Modelfile: the prompt as it is, without a chat template."""
    return (
        f"# ollama create NAME -f {name}.Modelfile\n"
        f"FROM ./{name}\n"
        'TEMPLATE """{{ .Prompt }}"""\n'
        f"PARAMETER num_ctx {block_size}\n"
        f"PARAMETER temperature {temperature}\n"
        "PARAMETER top_k 0\n"
        "PARAMETER top_p 1\n"
        "PARAMETER repeat_penalty 1\n"
    )


class LlamaRuntime:
    """The file as the server of llama.cpp opens it (package xllamacpp).

    Args:
        path: of the file.
        threads: of the CPU.
        n_ctx: length of the KV cache in tokens, which takes memory; 0: as the file says.
        is_exact: compute attention in float32; by default llama.cpp does in float16, which is
            faster and differs in the third digit.
    """

    def __init__(
        self, path: Path, threads: int = 1, *, n_ctx: int = 0, is_exact: bool = True
    ) -> None:
        xllamacpp: Any = import_module("xllamacpp")
        self.name = f"llama.cpp (xllamacpp {xllamacpp.__version__})"
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = n_ctx
        params.n_parallel = 1
        params.ctx_shift = True  # evict the older half of a full cache, as `sample` does
        if is_exact:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = threads
        params.verbosity = -1
        self.server = xllamacpp.Server(params)
        self.session: Any = import_module("requests").Session()
        self.session.trust_env = False  # no proxy: the server is on this machine

    def post(self, path: str, **request: Any) -> dict[str, Any]:
        """Return the server's answer to a request; OSError if it refuses or does not answer."""
        url = f"{self.server.listening_address}/{path}"
        reply = self.session.post(url, json=request, timeout=SECONDS)
        if not reply.ok:
            raise OSError(reply.text)
        answer: dict[str, Any] = reply.json()
        return answer

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.post("tokenize", content=text, add_special=False)["tokens"]
        return tokens

    def logits(self, tokens: list[int]) -> Logits:
        """Return the log-probabilities after the last token, (1, V)."""
        # no probabilities are given if a byte token is sampled: sample id 0, a character
        request = {"n_predict": 1, "n_probs": 1 << 30, "logit_bias": [[0, 1000]]}
        answer = self.post("completion", prompt=tokens, **request)
        found = answer["completion_probabilities"][0]["top_logprobs"]  # of all tokens, END the last
        by_id = sorted(found, key=itemgetter("id"))
        return np.array([[each["logprob"] for each in by_id[:-1]]])
