"""Checkpoints of nanoGPT become runs; hostile ones are refused and run nothing."""

import io
import pickle
import random
import shutil
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Cli, refusal
from noise import fill_with_noise

import chargpt.device
from chargpt import load_run, sample
from chargpt.config import ModelConfig
from chargpt.errors import ChargptError, DeviceError, RunError
from chargpt.export.huggingface import their_name
from chargpt.imports import NANOGPT_NAMES, PLAIN_OPCODES, import_nanogpt, read_pickle
from chargpt.models import build_model, count_parameters
from chargpt.models.gpt2 import GPT2

CHARACTERS = "\n abcdeé😀"
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "dropout": 0.0}


def noisy_gpt2(vocab_size: int = len(CHARACTERS), **sizes: object) -> GPT2:
    """Return a model whose every parameter is noise."""
    config = ModelConfig(kind="gpt2", **{**SIZES, **sizes})  # type: ignore[arg-type]
    model = fill_with_noise(build_model(config, vocab_size))
    assert isinstance(model, GPT2)
    assert model.num_parameters() == count_parameters(config, vocab_size)
    return model.eval()


def checkpoint_of(model: GPT2, *, prefix: str = "", bias: bool = True) -> dict[str, Any]:
    """Return a model as nanoGPT's training saves it."""
    weights = {
        prefix + their_name(name, NANOGPT_NAMES): tensor.clone()
        for name, tensor in model.state_dict().items()
        if bias or not name.endswith(".bias")
    }
    weights[f"{prefix}lm_head.weight"] = model.embedding.weight.detach().clone()
    weights[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 12, 12)  # the causal mask
    return {
        "model": weights,
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []},
        "model_args": {**SIZES, "bias": bias, "vocab_size": model.vocab_size},
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "verse", "device": "cpu"},
    }


def write(folder: Path, saved: object, itos: object = None) -> tuple[Path, Path]:
    """Write a checkpoint and its meta.pkl."""
    torch.save(saved, folder / "ckpt.pt")
    numbered = dict(enumerate(CHARACTERS)) if itos is None else itos
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 9, "itos": numbered, "stoi": {}}))
    return folder / "ckpt.pt", folder / "meta.pkl"


def test_gpt2_of_transformers_gives_the_same_logits() -> None:
    transformers = pytest.importorskip("transformers")
    model = noisy_gpt2()
    sizes = {"n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    others = {"activation_function": "gelu", "bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(vocab_size=model.vocab_size, **sizes, **others)
    reference = transformers.GPT2LMHeadModel(config).eval()
    weights = {
        name: tensor.T if tensor.dim() == 2 and ".c_" in name else tensor
        for name, tensor in checkpoint_of(model)["model"].items()
        if name != "transformer.h.0.attn.bias"
    }
    reference.load_state_dict(weights, strict=True)
    tokens = torch.randint(model.vocab_size, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = model(tokens), reference(tokens).logits
    assert ours.std() > 0.3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_cached_logits_equal_uncached_ones_also_after_eviction() -> None:
    """After eviction the newer half is computed again at positions from 0."""
    model = noisy_gpt2()
    tokens = torch.randint(model.vocab_size, (2, 19), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(2)
    with torch.no_grad():
        parts = [model(part, cache) for part in tokens[:, :12].split([5, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens[:, :12]))
        model.evict_oldest_half(cache)
        assert cache.length == 6
        for place in range(12, 18):
            found = model(tokens[:, place : place + 1], cache)[:, -1]
            torch.testing.assert_close(found, model(tokens[:, 6 : place + 1])[:, -1])


def test_attention_weights_are_those_of_the_forward_pass() -> None:
    model = noisy_gpt2()
    tokens = torch.arange(9)[None]
    layers = model.attention_weights(tokens)
    assert [layer.shape for layer in layers] == [(1, 2, 9, 9)] * 2
    for layer in layers:
        torch.testing.assert_close(layer.sum(-1), torch.ones(1, 2, 9))
        assert layer.triu(1).abs().max() == 0
    block = model.blocks[0]
    x = model.embed(tokens)
    _, _, v = model.first_layer_qkv(tokens)
    heads = (layers[0] @ v).transpose(1, 2).flatten(2)
    expected = x + block.attention.output(heads)
    after_attention = x + block.attention(block.attention_norm(x), None)
    torch.testing.assert_close(after_attention, expected)


@pytest.mark.parametrize(
    ("prefix", "bias", "numbered"),
    [("", True, CHARACTERS), ("_orig_mod.", False, CHARACTERS), ("", True, "é\n cba😀ed")],
)
def test_an_imported_run_gives_the_logits_of_the_checkpoint(
    prefix: str, bias: bool, numbered: str, tmp_path: Path
) -> None:
    """Also if the checkpoint numbers its characters in another order."""
    model = noisy_gpt2()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") and not bias:
                parameter.zero_()
    saved = checkpoint_of(model, prefix=prefix, bias=bias)
    paths = write(tmp_path, saved, dict(enumerate(numbered)))
    run = load_run(import_nanogpt(*paths, tmp_path / "run"))
    assert (run.step, run.state.best_nats_per_char, run.state.text_name) == (250, 1.5, "verse")
    text = "abc é😀\ncab"
    with torch.no_grad():
        logits = model(torch.tensor([[numbered.index(c) for c in text]]))[0]
    order = [numbered.index(c) for c in run.tokenizer.characters]
    torch.testing.assert_close(run.logits(text), logits[:, order])
    assert len(sample(run, prompt="ab", length=40, seed=1)[0]) == 42


def test_the_command_imports_a_run_that_evaluates_and_explains(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path, checkpoint_of(noisy_gpt2()))
    Path("input.txt").write_text((CHARACTERS + "abc dea bée 😀 cab\n") * 40, encoding="utf-8")
    words = ("import", "nanogpt", "ckpt.pt", "run", "--meta", "meta.pkl", "--text", "input.txt")
    done = cli(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "run\n"
    assert "exists" in refusal(cli(*words))
    commands = "evaluate run,explain run,score run input.txt,sample run -n 30,verify run,runs ."
    for command in commands.split(","):
        done = cli(*command.split())
        assert done.returncode == 0, (command, done.stderr)
    assert "finished" in done.stdout
    shown = " ".join(cli("explain", "run").stdout.split())
    assert "queries and keys, and values" in shown  # GPT-2 has neither a rotary embedding
    assert "RMSNorm" not in shown  # nor QK-norm
    assert cli("report", "run").returncode == 0
    page = Path("run/report.html").read_text("utf-8")
    assert "over-fits" not in page  # its own loss was measured in another way
    assert "Training curves" not in page
    assert "model.block_size is" in refusal(
        cli("train", "input.txt", "--from", "run", "-s", "model.block_size=8")
    )
    assert "model.kind=gpt2" in refusal(cli("export", "hf", "run", "out"))
    Path("other.txt").write_text("xyz" * 300)
    words = (*words[:3], "run2", *words[4:7], "other.txt")
    assert "different characters" in refusal(cli(*words))
    assert cli(*words[:3], "run3", "--meta", "meta.pkl").returncode == 0
    assert "run3 was imported without its text" in refusal(cli("evaluate", "run3"))


@pytest.mark.parametrize(("numbered", "newlines"), [(CHARACTERS, "lf"), ("\r\n cba😀ed", "keep")])
def test_the_text_has_the_line_ends_that_nanogpt_has_read(
    numbered: str, newlines: str, tmp_path: Path
) -> None:
    """In text mode Python reads CR LF as LF, unless it is told otherwise."""
    text = tmp_path / "input.txt"
    lines = "".join(sorted({*numbered} - {*"\r\n"})) + "\r\n"
    text.write_bytes((lines * 60).encode())
    paths = write(tmp_path, checkpoint_of(noisy_gpt2()), dict(enumerate(numbered)))
    run = load_run(import_nanogpt(*paths, tmp_path / "run", text))
    assert run.config.text.newlines == newlines
    assert run.corpus().tokenizer == run.tokenizer
    assert run.tokenizer.has_crlf == ("\r" in numbered)


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def evil_objects(marker: Path) -> list[object]:
    """Return objects whose unpickling would create a file."""
    import builtins
    import os
    import subprocess

    code = f"open({str(marker)!r}, 'w')"
    return [
        Evil(os.system, f"touch {marker}"),
        Evil(eval, code),
        Evil(exec, code),
        Evil(builtins.open, str(marker), "w"),
        Evil(subprocess.check_call, ["touch", str(marker)]),
        Evil(Path.touch, marker),
        Evil(__import__, "os"),
        Evil(torch.load, str(marker)),
        Evil(np.load, str(marker)),
    ]


def replaced_pickle(checkpoint: bytes, content: bytes) -> bytes:
    """Return a checkpoint with another `data.pkl`."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(checkpoint)) as old, zipfile.ZipFile(result, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, content if is_pickle else old.read(entry))
    return result.getvalue()


def changed_checkpoints(saved: dict[str, Any]) -> list[object]:
    """Return checkpoints with values of the wrong kind or size."""
    args, weights = saved["model_args"], saved["model"]
    nested: list[object] = []
    for _ in range(60):
        nested = [nested, nested]
    models: list[object] = [None, {}, {3: 4}, {"transformer.h.x.ln_1.weight": 3}]
    models += [
        {**weights, "lm_head.weight": weights["lm_head.weight"] + 1},
        {name: tensor * float("nan") for name, tensor in weights.items()},
    ]
    positions = [
        torch.zeros(3, 3),
        torch.zeros(1).expand(65536, 65536),
        torch.zeros(1).half().expand(65536, 65536),
        torch.zeros(12, 16).to_sparse(),
        torch.empty(12, 16, device="meta"),
    ]
    models += [{**weights, "transformer.wpe.weight": tensor} for tensor in positions]
    sizes: list[dict[str, object]] = [
        *({"n_layer": value} for value in (nested, -1, "2", 10**12)),
        {"n_embd": 65536, "n_layer": 256},
        {"block_size": 65536},
        {"n_head": 3},
        {"vocab_size": 10},
    ]
    changes: list[dict[str, object]] = [
        *({"model": each} for each in models),
        *({"model_args": {**args, **each}} for each in sizes),
        {"model_args": None},
        *({"iter_num": value} for value in (float("inf"), -5, "many")),
        *({"best_val_loss": value} for value in (10**400, None)),
        *({"config": value} for value in ({"dataset": nested}, 7)),
    ]
    return [[], {}, *({**saved, **change} for change in changes)]


def hostile_files(
    saved: dict[str, Any], good: dict[str, bytes], marker: Path
) -> list[tuple[str, bytes]]:
    """Return names and contents of files that must be refused."""
    found = []
    for protocol in (0, 2, 4):
        for each in evil_objects(marker):
            content = pickle.dumps(each, protocol=protocol)
            found += [("meta.pkl", content), ("ckpt.pt", content)]
            found.append(("ckpt.pt", replaced_pickle(good["ckpt.pt"], content)))
    for each in changed_checkpoints(saved):
        stream = io.BytesIO()
        torch.save(each, stream)
        found.append(("ckpt.pt", stream.getvalue()))
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 50_000_000)
    found.append(("ckpt.pt", bomb.getvalue()))
    vocabularies: list[object] = [5, {0: "ab"}, {1: "a"}, {0: "\ud800"}, {0: "ab", 1: ""}]
    vocabularies += [{0: "a", 1: "a"}, {0: "a", 1: "b", 2: "", 3: "ab"}]
    trees: list[object] = [3, {}, *({"itos": each} for each in vocabularies)]
    found += [("meta.pkl", pickle.dumps(tree)) for tree in trees]
    deep = b"(" * 1_000_000 + b"t" * 1_000_000  # a tuple whose hash overflows the stack
    found.append(("meta.pkl", b"\x80\x02}" + deep + b"K\x01s."))
    for name, content in good.items():
        found += [(name, b""), (name, content[: len(content) // 2])]
    return found


def changed_at_random(good: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield files with some bytes changed, mostly those that describe the weights."""
    generator = random.Random(0)
    for name, content in good.items():
        for _ in range(60):
            changed = bytearray(content)
            for _ in range(generator.randint(1, 8)):
                changed[generator.randrange(min(len(changed), 3000))] = generator.randrange(256)
            yield name, bytes(changed)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hostile_files_run_nothing_and_are_refused_with_one_sentence(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    saved = checkpoint_of(noisy_gpt2())
    good = {path.name: path.read_bytes() for path in write(tmp_path, saved)}

    def refusal_of(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        try:
            import_nanogpt(tmp_path / "ckpt.pt", tmp_path / "meta.pkl", tmp_path / "run")
        except ChargptError as error:
            return str(error)
        finally:
            (tmp_path / name).write_bytes(good[name])
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            assert not marker.exists(), content
        return ""

    resource = pytest.importorskip("resource", reason="limits memory")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2_000_000_000, hard))
    try:
        messages = [refusal_of(*each) for each in hostile_files(saved, good, marker)]
        for each in changed_at_random(good):  # a changed weight or name is no error
            message = refusal_of(*each)
            messages += [message] if message else []
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert len(messages) > 150
    assert all(messages)
    assert all("\n" not in message and len(message) < 500 for message in messages)
    # the same objects do run code where nothing forbids it
    pickle.loads(pickle.dumps(evil_objects(marker)[0]))
    assert marker.exists()


def test_a_memo_of_64_gigabytes_is_refused_before_it_is_made(tmp_path: Path) -> None:
    paths = write(tmp_path, checkpoint_of(noisy_gpt2()))
    paths[1].write_bytes(b"}r\xff\xff\xff\xff.")
    with pytest.raises(RunError, match="more memory than it needs"):
        import_nanogpt(*paths, tmp_path / "run")


def shrunk_directory(checkpoint: bytes) -> bytes:
    """Return a checkpoint with compressed entries, whose directory states smaller sizes."""
    result = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(checkpoint)) as old,
        zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry) + bytes(50_000_000))
        for info in new.infolist():
            info.file_size = 40
    return result.getvalue()


def test_what_a_pickle_or_archive_asks_for_is_refused_before_it_is_allocated(
    tmp_path: Path,
) -> None:
    """Measured by peak memory: a refusal afterwards would look the same."""
    paths = write(tmp_path, checkpoint_of(noisy_gpt2()))
    good = {path: path.read_bytes() for path in paths}
    call = b"\x80\x02c__builtin__\nbytearray\nJ\x00\xca\x9a\x3b\x85R."  # of a gigabyte
    deep = b"\x80\x02}" + b"(" * 500_000 + b"t" * 500_000 + b"K\x01s."
    hostile = [
        *((paths[0], replaced_pickle(good[paths[0]], each)) for each in (call, deep)),
        (paths[0], replaced_pickle(good[paths[0]], b"\x80\x02(" + b"}" * 20_000_000 + b"t.")),
        (paths[0], shrunk_directory(good[paths[0]])),
        (paths[1], b"\x80\x04(" + b"}" * 20_000_000 + b"d."),
        (paths[1], b"\x80\x05\x96\x00\xca\x9a\x3b\0\0\0\0."),  # BYTEARRAY8 of a gigabyte
    ]
    tracemalloc.start()
    try:
        for path, content in hostile:
            path.write_bytes(content)
            tracemalloc.reset_peak()
            with pytest.raises(RunError):
                import_nanogpt(*paths, tmp_path / "run")
            assert tracemalloc.get_traced_memory()[1] < 200_000_000, content[:50]
            path.write_bytes(good[path])
    finally:
        tracemalloc.stop()


def test_the_optimizer_of_a_checkpoint_is_not_read(tmp_path: Path) -> None:
    saved = checkpoint_of(noisy_gpt2())
    saved["optimizer"]["state"] = {0: {"exp_avg": torch.zeros(10_000_000)}}
    paths = write(tmp_path, saved)
    tracemalloc.start()
    try:
        import_nanogpt(*paths, tmp_path / "run")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_checkpoint_that_exceeds_the_memory_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write(tmp_path, checkpoint_of(noisy_gpt2()))
    monkeypatch.setattr(chargpt.device, "memory_limit", lambda _: 2 * paths[0].stat().st_size - 1)
    with pytest.raises(DeviceError, match=r"ckpt\.pt would need about"):
        import_nanogpt(*paths, tmp_path / "run")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"meta\.pkl .*No such file"):
        import_nanogpt(tmp_path / "ckpt.pt", tmp_path / "meta.pkl", tmp_path / "run")


@pytest.mark.parametrize(
    ("value", "opcode"),
    [
        ({1}, "EMPTY_SET"),
        (frozenset([1]), "FROZENSET"),
        (bytearray(9), "BYTEARRAY8"),
        (9**99, "LONG1"),
    ],
)
def test_a_pickle_of_a_meta_holds_text_numbers_and_dicts_only(value: object, opcode: str) -> None:
    content = pickle.dumps({"itos": {0: "a"}, "more": value}, protocol=5)
    with pytest.raises(ValueError, match=f"it contains {opcode}"):
        read_pickle(content, PLAIN_OPCODES)
    assert read_pickle(pickle.dumps({"itos": {0: "a"}}), PLAIN_OPCODES) == {"itos": {0: "a"}}
