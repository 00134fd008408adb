"""Lossless compression: what a model expects decides how many bits each character takes.

The text is cut into lanes of one length, and all lanes are predicted together, one character of
each at a time, by the very steps that sampling takes. Coding and decoding do the same steps on the
same shapes, so both see the same bits; what is expected is rounded to integers, and an arithmetic
coder (Witten, Neal and Cleary 1987) takes them in turn. A lane's first character takes log2(V)
bits; after that a character is predicted from a block before it at most and more than half of one,
nearly as the protocol `sliding` scores it. So a file is as long as that loss says: a measure of the
model that cannot be fooled.

Another machine may round another way. What computes is noted in the file and compared, and the
text's checksum is compared at the end.
Shapes in this file: N = characters, L = lanes, V = vocabulary.
"""

import hashlib
import platform
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from chargpt.device import onednn_is_faster, require_memory
from chargpt.errors import ChargptError, TextError, WorkError
from chargpt.inference.decoder import decoder_for
from chargpt.inference.drawing import Ids, highest
from chargpt.models import LanguageModel
from chargpt.store.run import Run
from chargpt.store.tensors import serialize

MOST_LANES = 64
LANE = 4096  # characters that make another lane worth its first character
HEADER = struct.Struct("<4sBBI8s4sI")  # magic, version, threads, N, model, platform, checksum
MAGIC = b"cgpt"
VERSION = 3  # rises with the format, and whenever predictions are rounded another way
MOST_CHARACTERS = 2**32 - 1
MOST_A_BYTE = 10_000  # characters: what a byte may stand for at most, so that no file is a bomb
SHARES = 2**30  # what probabilities are rounded to parts of
TOP, BOTTOM = 2**56, 2**48  # the range stays between them

Watch = Callable[[int, int], object]  # told how many characters are done, and of how many


def compress(run: Run, content: bytes, watch: Watch = lambda *_: None) -> bytes:
    """Return a text, as UTF-8, in as few bytes as the run's model needs for it.

    Args:
        run: on the CPU; `decompress` needs the same.
        content: any UTF-8 text whose characters are all in the run's vocabulary.
        watch: told how far it is.

    Raises:
        TextError: it is not UTF-8, or too long.
        UnknownCharacterError: the vocabulary lacks a character.
        WorkError: the model's weights give numbers that are not finite.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise TextError(f"the text is not UTF-8 ({error}); convert it first") from None
    tokens = run.tokenizer.encode(text, unknown="error").astype(np.int64)
    if len(tokens) > MOST_CHARACTERS:
        raise TextError(f"the text is over {MOST_CHARACTERS:,} characters; compress it in parts")
    coder, done = Encoder(), 0
    threads = min(torch.get_num_threads(), 255)
    with _steady(run.model, threads):
        lanes = lanes_of(tokens)
        expected = _Expected(run.model, len(lanes))
        for column in _columns(lanes, len(tokens)):
            ends, totals = expected.next()
            for lane, token in enumerate(column.tolist()):
                start = int(ends[lane, token - 1]) if token else 0
                coder.add(start, int(ends[lane, token]), totals[lane])
            expected.take(column)
            done += len(column)
            watch(done, len(tokens))
    packed = coder.finish()
    packed += bytes(max(0, len(tokens) // MOST_A_BYTE - len(packed)))
    facts = (threads, len(tokens), _model_key(run), _platform_key(), zlib.crc32(content))
    return HEADER.pack(MAGIC, VERSION, *facts) + packed


def decompress(run: Run, packed: bytes, watch: Watch = lambda *_: None) -> bytes:
    """Return the text that `compress` was given.

    Args:
        run: the same, on the same platform.
        packed: what `compress` returned.
        watch: told how far it is.

    Raises:
        ChargptError: it is something else, or another run's, or another platform's.
        WorkError: it does not come back as it was: damaged, or this machine computes otherwise.
    """
    if len(packed) < HEADER.size or packed[:4] != MAGIC:
        raise ChargptError("this is no file that `chargpt compress` has made; name another")
    _, version, threads, count, model_key, platform_key, checksum = HEADER.unpack(
        packed[: HEADER.size]
    )
    body = packed[HEADER.size :]
    if version != VERSION:
        raise ChargptError(
            f"this file has version {version}, and this chargpt writes and reads {VERSION}; "
            "decompress it with the chargpt that made it"
        )
    if model_key != _model_key(run):
        raise ChargptError("another model has compressed this; name the run it was made with")
    if platform_key != _platform_key():
        raise ChargptError(
            "this was compressed where the processor, torch or numpy is another one, which rounds "
            "another way; decompress it there"
        )
    if count > MOST_A_BYTE * (len(body) + 1) or not threads:
        raise ChargptError("the file is damaged: it is too short for its text; restore it")
    require_memory(9 * count, f"a text of {count:,} characters")
    tokens = np.zeros(count, dtype=np.int64)
    coder, done = Decoding(body), 0
    with _steady(run.model, threads):
        lanes = lanes_of(tokens)
        expected = _Expected(run.model, len(lanes))
        for column in _columns(lanes, count):
            ends, totals = expected.next()
            for lane in range(len(column)):
                aim = coder.aim(totals[lane])
                token = int(ends[lane].searchsorted(aim, side="right"))
                coder.take(int(ends[lane, token - 1]) if token else 0, int(ends[lane, token]))
                column[lane] = token
            expected.take(column)
            done += len(column)
            watch(done, count)
    content = run.tokenizer.decode(lanes.reshape(-1)[:count]).encode()
    if zlib.crc32(content) != checksum:
        raise WorkError(
            "the text did not come back as it was: the file is damaged, or this machine computes "
            "another way than the one that made it"
        )
    return content


class _Expected:
    """What a model expects next in each of L lanes, in whole numbers."""

    def __init__(self, model: LanguageModel, lanes: int) -> None:
        self.model = model
        self.lanes = lanes
        self.decoder = decoder_for(model, lanes)
        self.previous: Ids | None = None

    def take(self, column: Ids) -> None:
        """Take in the next character of each lane; a short last lane may have none."""
        self.previous = np.zeros(self.lanes, dtype=np.int64)
        self.previous[: len(column)] = column

    def next(self) -> tuple[Ids, list[int]]:
        """Return where each token's part ends, (L, V), and the sum of all parts of each lane."""
        if self.previous is None:
            parts = np.ones((self.lanes, self.model.vocab_size), dtype=np.int64)
        else:
            logits = self.decoder.step(self.previous).astype(np.float64)  # (L, V)
            shares = np.exp(logits - highest(logits))
            shares *= SHARES / shares.sum(axis=1, keepdims=True)
            parts = shares.astype(np.int64) + 1  # whatever may come has a part
        ends = parts.cumsum(axis=1)
        return ends, ends[:, -1].tolist()


class Encoder:
    """An arithmetic coder: turns parts of a whole, one after another, into bytes."""

    def __init__(self) -> None:
        self.low = 0
        self.range = TOP
        self.bytes = bytearray()

    def add(self, start: int, end: int, total: int) -> None:
        """Take in the part from `start` to `end` of `total`."""
        part = self.range // total
        self.low += start * part
        self.range = (end - start) * part
        self._carry()
        while self.range < BOTTOM:
            self.bytes.append(self.low >> 48)
            self.low = self.low << 8 & TOP - 1
            self.range <<= 8

    def finish(self) -> bytes:
        """Return all bytes, but for zeros at the end: beyond it they are read as zeros."""
        for count in range(8):
            unit = 1 << 56 - 8 * count
            value = -(-self.low // unit) * unit
            if value < self.low + self.range:
                break
        self.low = value
        self._carry()
        self.bytes += self.low.to_bytes(7)[:count]
        return bytes(self.bytes).rstrip(b"\0")

    def _carry(self) -> None:
        if self.low < TOP:
            return
        self.low -= TOP
        place = len(self.bytes) - 1
        while self.bytes[place] == 255:
            self.bytes[place] = 0
            place -= 1
        self.bytes[place] += 1


class Decoding:
    """The way back from an `Encoder`'s bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.place = 7
        self.ahead = int.from_bytes(content[:7].ljust(7, b"\0"))  # of the start of the range
        self.range = TOP
        self.part = 0

    def aim(self, total: int) -> int:
        """Return a number from 0 to `total`, which lies in the part that was taken in."""
        self.part = self.range // total
        return min(self.ahead // self.part, total - 1)

    def take(self, start: int, end: int) -> None:
        """Go on after the part from `start` to `end`."""
        self.ahead -= start * self.part
        self.range = (end - start) * self.part
        self.ahead = min(self.ahead, self.range - 1)  # only where the bytes are damaged
        while self.range < BOTTOM:
            next_byte = self.content[self.place] if self.place < len(self.content) else 0
            self.place += 1
            self.ahead = self.ahead << 8 | next_byte
            self.range <<= 8


def lanes_of(tokens: Ids) -> Ids:
    """Return the ids as (L, characters of a lane), filled up with zeros."""
    count = min(MOST_LANES, max(1, len(tokens) // LANE))
    length = max(1, -(-len(tokens) // count))
    lanes = np.zeros((max(1, -(-len(tokens) // length)), length), dtype=np.int64)
    lanes.reshape(-1)[: len(tokens)] = tokens
    return lanes


def _columns(lanes: Ids, count: int) -> Iterator[Ids]:
    """Yield the lanes' first characters, their second ones and so on, those that are there."""
    length = lanes.shape[1]
    full = count // length
    for place in range(length if count else 0):
        yield lanes[: full + (place < count - full * length), place]


@contextmanager
def _steady(model: LanguageModel, threads: int) -> Iterator[None]:
    """Compute with so many threads, in evaluation mode, for a while."""
    before, was_training = torch.get_num_threads(), model.training
    torch.set_num_threads(threads)
    model.eval()
    try:
        with threadpool_limits(threads, user_api="blas"):  # of numpy, which rounds by it too
            yield
    finally:
        torch.set_num_threads(before)
        model.train(was_training)


def _model_key(run: Run) -> bytes:
    """Return what tells this model and vocabulary from all others."""
    settings = run.tokenizer.to_json() + run.config.model.model_dump_json()
    digest = hashlib.sha256(settings.encode())
    for chunk in serialize(run.model.state_dict()):
        digest.update(chunk)
    return digest.digest()[:8]


def _platform_key() -> bytes:
    """Return what tells this way of computing from others that may round another way."""
    capability = torch.backends.cpu.get_cpu_capability()
    blas = [
        (library["internal_api"], library.get("version"), library.get("architecture"))
        for library in threadpool_info()
        if library["user_api"] == "blas"
    ]
    facts = (
        *(platform.machine(), platform.system(), capability, onednn_is_faster()),
        *(torch.__version__, np.__version__, sorted(map(repr, blas))),
    )
    return hashlib.sha256(repr(facts).encode()).digest()[:4]
