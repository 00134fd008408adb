"""Lossless compression: arithmetic coding with a model's next-character probabilities.

The text is cut into lanes of equal length, whose tokens one decoder predicts as its sequences:
step t predicts token t of every lane. Compression and decompression run the same steps on arrays of
the same shapes, with bitwise identical results. Probabilities are rounded to integer
frequencies for an arithmetic coder (Witten, Neal and Cleary 1987). The first token of a lane
costs log2(V) bits; the others have the context of incremental decoding (decoders.py), so
the compressed size is close to the loss of the protocol `sliding`.

Another machine may round differently. The file names the platform, which is compared before
decompression, and contains a checksum of the text, which is compared afterwards.

Shapes in this file: N = tokens, L = lanes, V = vocabulary size.
"""

import hashlib
import os
import platform
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_info

from chargpt.device import one_blas_thread, onednn_is_faster, require_memory
from chargpt.errors import OperationError, TextError
from chargpt.inference.decoders import Decoder, build_decoder
from chargpt.inference.evaluation import OnProgress
from chargpt.inference.sampling import max_logits
from chargpt.models import LanguageModel, eval_mode
from chargpt.models.mixture import Mixture
from chargpt.store.run import Run
from chargpt.text.source import BYTE_ORDER_MARK, RECORD_SEPARATOR, codec_name, decode_bytes
from chargpt.text.tokenizer import Tokens, UnknownPolicy

BuildDecoder = Callable[[int], Decoder]  # of a number of lanes

MAX_LANES = 64
MAX_PROBABILITIES = 5_000_000  # L x V, which take 48 bytes each
MAX_ADAPTIVE_LANES = 8  # the fewer, the more each learns, and the longer it takes
MIN_LANE_TOKENS = 4096  # so that the first characters of lanes add little to the size
# magic, version, threads of the decoder, N, step of the checkpoint, model, platform, checksum
HEADER = struct.Struct("<4sBBIQ8s4sI")
Mode = Literal["plain", "mixture", "adaptive"]  # of the model
MAGIC: dict[Mode, bytes] = {"plain": b"cgpt", "mixture": b"cgpm", "adaptive": b"cgpa"}
VERSION = 5  # raised when the format changes or predictions are rounded differently
ENCODED_VERSION = 6  # like 5, with how the text is encoded after the header
ENCODING = struct.Struct("<?B?19s")  # a `Form`
MAX_TOKENS = 2**32 - 1
MAX_TOKENS_PER_BYTE = 10_000  # so that a small file cannot expand without bound
FREQUENCY_SCALE = 2**30  # sum of a distribution's frequencies, before 1 is added to each
BYTES_PER_CHARACTER = 16  # of memory, measured: tokens, text and UTF-8
MAX_RANGE, MIN_RANGE = 2**56, 2**48  # of the arithmetic coder's interval


class Form(NamedTuple):
    """How the bytes of a compressed text differ from its characters in UTF-8.

    Attributes:
        has_mark: whether a byte order mark precedes them.
        newline: number in NEWLINES of what every line end is, and LF for the model, which lacks CR.
        has_separators: whether the separators of documents are EOS tokens for the model.
        codec: ASCII, padded with zeros or not.
    """

    has_mark: bool
    newline: int
    has_separators: bool
    codec: bytes


NEWLINES = ("\n", "\r\n", "\r")
PLAIN = Form(has_mark=False, newline=0, has_separators=False, codec=b"utf-8")


def decode(run: Run, content: bytes, encoding: str, name: str = "the text") -> tuple[str, Form]:
    """Return a text as a run's model reads it, and the form of its bytes.

    Raises:
        TextError: the bytes do not decode, or the text does not encode to the same bytes.
    """
    text, codec, mark = decode_bytes(content, encoding, name)
    number = 0
    if "\r" in text and run.tokenizer.find_unknown("\r"):
        for each in (1, 2):
            lines = text.replace(NEWLINES[each], "\n")
            if lines != text == lines.replace("\n", NEWLINES[each]):
                text, number = lines, each
                break
    separator, eos_token = run.config.text.documents, run.tokenizer.eos_token
    has_separators = False
    if separator not in (None, "auto", "files") and eos_token == RECORD_SEPARATOR not in text:
        has_separators = separator in text
        text = text.replace(separator, eos_token)
    return text, Form(bool(mark), number, has_separators, codec.encode())


def _encode(run: Run, text: str, form: Form) -> bytes:
    """Return the bytes of a text in a form; characters that the codec lacks become `?`.

    Raises:
        TextError: there is no such codec.
    """
    try:
        if form.has_separators:
            text = text.replace(run.tokenizer.eos_token, run.config.text.documents or "")
        text = text.replace("\n", NEWLINES[form.newline])
        codec = codec_name(form.codec.rstrip(b"\0").decode())
        return (BYTE_ORDER_MARK * form.has_mark + text).encode(codec, "replace")
    except (IndexError, TextError, UnicodeError):  # the last from codecs of host names
        raise TextError("the file is damaged: its text has no such encoding; restore it") from None


def compress(
    run: Run,
    content: bytes,
    on_progress: OnProgress = lambda *_: None,
    unknown: UnknownPolicy = "error",
    adaptive: BuildDecoder | None = None,
    encoding: str = "auto",
) -> bytes:
    """Compress a text with a run's model.

    Args:
        run: a run on the CPU; `decompress` needs the same.
        content: the text's bytes.
        on_progress: called with the number of tokens done, and of all.
        unknown: policy for characters outside the vocabulary: only `error` is lossless.
        adaptive: builds a decoder that learns from the text (training/adaptive.py); `decompress`
            needs the same.
        encoding: of the text; `auto` is UTF-8, or what a byte order mark states.

    Raises:
        TextError: the text does not decode, or not to the same bytes back, or is too long.
        UnknownCharacterError: a character is not in the vocabulary, and `unknown` is `error`.
        OperationError: the model's logits are not finite.
    """
    text, form = decode(run, content, encoding)
    if unknown == "error" and "\r" in run.tokenizer.find_unknown(text):
        raise TextError(
            "the text has line ends of several kinds, and the vocabulary lacks CR, so that they "
            "would not be restored; make them one kind"
        )
    tokens = run.tokenizer.encode(text, unknown=unknown)
    content = _encode(run, run.tokenizer.decode(tokens), form)  # what `decompress` will return
    if len(tokens) > MAX_TOKENS:
        raise TextError(f"the text is over {MAX_TOKENS:,} tokens; compress it in parts")
    encoder = ArithmeticEncoder()
    threads = min(os.cpu_count() or 1, 255)
    lanes = split_into_lanes(tokens, _max_lanes(run, adaptive))
    steps = _iter_distributions(run, lanes, len(tokens), threads, adaptive, on_progress)
    with _single_threaded_inference(run.model):
        for column, cdf in steps:
            totals = cdf[:, -1].tolist()
            for lane, token in enumerate(column.tolist()):
                encoder.encode(int(cdf[lane, token]), int(cdf[lane, token + 1]), totals[lane])
    body = encoder.finish()
    body += bytes(max(0, len(tokens) // MAX_TOKENS_PER_BYTE - len(body)))
    keys = (run.step, run.fingerprint(), _platform_key())
    kind: Mode = "mixture" if isinstance(run.model, Mixture) else "plain"
    magic = MAGIC["adaptive" if adaptive else kind]
    version, encoded = VERSION, b""
    if form != PLAIN:
        version, encoded = ENCODED_VERSION, ENCODING.pack(*form)
    header = HEADER.pack(magic, version, threads, len(tokens), *keys, zlib.crc32(content))
    return header + encoded + body


def header_size(packed: bytes) -> int:
    """Return the number of bytes before the compressed tokens."""
    return HEADER.size + (ENCODING.size if packed[4] == ENCODED_VERSION else 0)


def read_header(packed: bytes) -> tuple[int, Mode]:
    """Return the step of the checkpoint that a text was compressed with, and the kind of model.

    Raises:
        TextError: the file is of another format or version.
    """
    kinds: dict[bytes, Mode] = {magic: kind for kind, magic in MAGIC.items()}
    if len(packed) < HEADER.size or packed[:4] not in kinds or len(packed) < header_size(packed):
        raise TextError("the file was not made by `chargpt compress`; name another")
    magic, version, _, _, step, *_ = HEADER.unpack_from(packed)
    if version not in (VERSION, ENCODED_VERSION):
        raise TextError(
            f"the file has version {version}, and this chargpt reads and writes versions {VERSION} "
            f"and {ENCODED_VERSION}; decompress it with the chargpt that made it"
        )
    return int(step), kinds[magic]


def decompress(
    run: Run,
    packed: bytes,
    on_progress: OnProgress = lambda *_: None,
    adaptive: BuildDecoder | None = None,
) -> bytes:
    """Return the text that `compress` was given, with the same run and `adaptive`.

    Raises:
        TextError: the file is of another format, version, run or platform.
        OperationError: the checksum differs: the file is damaged, or this machine rounds
            differently.
    """
    step, kind = read_header(packed)
    assert (kind == "adaptive") == (adaptive is not None), "compressed with another decoder"
    _, _, threads, count, _, model_key, platform_key, checksum = HEADER.unpack_from(packed)
    body, form = packed[header_size(packed) :], PLAIN
    if len(packed) - len(body) > HEADER.size:
        form = Form(*ENCODING.unpack_from(packed, HEADER.size))
    if model_key != run.fingerprint():
        raise TextError(
            f"the file was compressed with another model (step {step:,}, weights "
            f"{model_key.hex()}); name the run that made it"
        )
    if platform_key != _platform_key():
        raise TextError(
            "the file was compressed with another processor, torch or numpy, which rounds "
            "differently; decompress it there"
        )
    if count > MAX_TOKENS_PER_BYTE * (len(body) + 1):
        raise TextError("the file is damaged: it is too short for its text; restore it")
    require_memory(BYTES_PER_CHARACTER * count, f"a text of {count:,} characters")
    coder = ArithmeticDecoder(body)
    tokens = np.zeros(count, dtype=run.tokenizer.dtype)
    lanes = split_into_lanes(tokens, _max_lanes(run, adaptive))
    steps = _iter_distributions(run, lanes, count, threads, adaptive, on_progress)
    with _single_threaded_inference(run.model):
        for column, cdf in steps:
            totals = cdf[:, -1].tolist()
            for lane in range(len(column)):
                value = coder.decode(totals[lane])
                token = int(cdf[lane].searchsorted(value, side="right")) - 1
                coder.consume(int(cdf[lane, token]), int(cdf[lane, token + 1]))
                column[lane] = token
    content = _encode(run, run.tokenizer.decode(lanes.reshape(-1)[:count]), form)
    if zlib.crc32(content) != checksum:
        raise OperationError(
            "the text's checksum differs: the file is damaged, or this machine rounds differently "
            "from the one that compressed it; restore the file or decompress it there"
        )
    return content


def _iter_distributions(
    run: Run,
    lanes: Tokens,
    count: int,
    threads: int,
    adaptive: BuildDecoder | None,
    on_progress: OnProgress,
) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield the tokens at each position of the lanes, without padding, and their distributions.

    A distribution is cumulative frequencies, (L, V + 1): token i of a lane has the interval from
    the i-th to the next. The yielded tokens are a view into `lanes`, so that decompression can
    assign them, and the distributions one array, changed in place.
    """
    num_lanes, length = lanes.shape
    n_full, n_last = divmod(count, length)  # full lanes, and tokens of a shorter last one
    cdf = np.tile(np.arange(run.model.vocab_size + 1), (num_lanes, 1))  # uniform at first
    done = 0
    build = adaptive or partial(build_decoder, run.model, max_threads=threads)
    decoder = build(num_lanes)
    for position in range(length if count else 0):
        if position:
            tokens = lanes[:, position - 1].astype(np.int64)
            logits = decoder.step(tokens).astype(np.float64)  # (L, V)
            probs = np.exp(logits - max_logits(logits))
            probs *= FREQUENCY_SCALE / probs.sum(axis=1, keepdims=True)
            frequencies = probs.astype(np.int64) + 1  # no character is impossible
            frequencies.cumsum(axis=1, out=cdf[:, 1:])
        n_active = n_full + (position < n_last)
        yield lanes[:n_active, position], cdf
        done += n_active
        on_progress(done, count)


class ArithmeticEncoder:
    """Arithmetic coder (as a range coder): encodes a sequence of frequency intervals as bytes."""

    def __init__(self) -> None:
        self.low = 0
        self.range = MAX_RANGE
        self.bytes = bytearray()

    def encode(self, start: int, end: int, total: int) -> None:
        """Encode the interval from `start` to `end` of `total`."""
        unit = self.range // total
        self.low += start * unit
        self.range = (end - start) * unit
        self._carry()
        while self.range < MIN_RANGE:
            self.bytes.append(self.low >> 48)
            self.low = self.low << 8 & MAX_RANGE - 1
            self.range <<= 8

    def finish(self) -> bytes:
        """Return all bytes, without zeros at the end: the decoder reads zeros past the end."""
        for count in range(8):
            unit = 1 << 56 - 8 * count
            value = -(-self.low // unit) * unit  # the multiple of `unit` with the fewest bytes
            if value < self.low + self.range:
                break
        self.low = value
        self._carry()
        self.bytes += self.low.to_bytes(7)[:count]
        return bytes(self.bytes).rstrip(b"\0")

    def _carry(self) -> None:
        """Propagate an overflow of `low` into the bytes already written."""
        if self.low < MAX_RANGE:
            return
        self.low -= MAX_RANGE
        index = len(self.bytes) - 1
        while self.bytes[index] == 255:
            self.bytes[index] = 0
            index -= 1
        self.bytes[index] += 1


class ArithmeticDecoder:
    """Inverse of `ArithmeticEncoder`."""

    def __init__(self, content: bytes) -> None:
        self.further = iter(content[7:])  # bytes, followed by zeros
        self.offset = int.from_bytes(content[:7].ljust(7, b"\0"))  # from the start of the range
        self.range = MAX_RANGE
        self.unit = 0

    def decode(self, total: int) -> int:
        """Return a number in [0, total) that lies in the next interval."""
        self.unit = self.range // total
        return min(self.offset // self.unit, total - 1)

    def consume(self, start: int, end: int) -> None:
        """Advance past the interval from `start` to `end`, of the total given to `decode`."""
        self.range = (end - start) * self.unit
        # the maximum is exceeded only if the bytes are damaged
        self.offset = min(self.offset - start * self.unit, self.range - 1)
        while self.range < MIN_RANGE:
            self.offset = self.offset << 8 | next(self.further, 0)
            self.range <<= 8


def _max_lanes(run: Run, adaptive: BuildDecoder | None) -> int:
    """Return the most lanes; fewer of a vocabulary whose distributions need much memory."""
    n_affordable = max(1, MAX_PROBABILITIES // run.model.vocab_size)
    return min(n_affordable, MAX_ADAPTIVE_LANES if adaptive else MAX_LANES)


def split_into_lanes(tokens: Tokens, max_lanes: int = MAX_LANES) -> Tokens:
    """Return the tokens as (L, tokens per lane), padded with zeros."""
    max_lanes = min(max_lanes, max(1, len(tokens) // MIN_LANE_TOKENS))
    length = max(1, -(-len(tokens) // max_lanes))
    lanes = np.zeros((max(1, -(-len(tokens) // length)), length), dtype=tokens.dtype)
    lanes.reshape(-1)[: len(tokens)] = tokens
    return lanes


@contextmanager
def _single_threaded_inference(model: LanguageModel) -> Iterator[None]:
    """Run a model in evaluation mode, PyTorch and BLAS on one thread.

    Rounding depends on their threads, and beside a busy process several are far slower than one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with eval_mode(model), one_blas_thread():
            yield
    finally:
        torch.set_num_threads(before)


def _platform_key() -> bytes:
    """Return a hash of what rounding depends on: processor, torch, numpy and its BLAS."""
    capability = torch.backends.cpu.get_cpu_capability()
    blas = [
        (library["internal_api"], library.get("version"), library.get("architecture"))
        for library in threadpool_info()
        if library["user_api"] == "blas"
    ]
    processor = (platform.machine(), platform.system(), capability, onednn_is_faster())
    libraries = (torch.__version__, np.__version__, sorted(map(repr, blas)))
    return hashlib.sha256(repr(processor + libraries).encode()).digest()[:4]
