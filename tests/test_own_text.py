"""A run owns its text: whatever is asked of it needs nothing outside its folder."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import REPOSITORY, Cli, refusal, run_here

from chargpt.store.checkpoint import list_checkpoints

GOLDEN = REPOSITORY / "tests" / "golden" / "0.1.0" / "run"
SETTINGS = (
    "-s train.max_steps=12 -s train.batch_size=4 -s train.save_every=6 -s train.evaluate_every=6 "
    "-s train.sample_every=0 -s model.n_layer=1 -s model.n_embd=16 -s model.block_size=16 "
    "-s text.mixture_characters=800 -s dtype=float32 --device cpu"
).split()
MORE = ("train", "--resume", "run", "-s", "train.max_steps=18")


def weights(run: Path) -> list[bytes]:
    newest = list_checkpoints(run / "checkpoints")[-1]
    return [(newest / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in another folder than it was trained in; the text and the original are deleted."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "poems").mkdir()
    for name in ("a", "b"):  # the first file ends before the validation split
        shutil.copy(REPOSITORY / "data" / "lighthouse.txt", folder / "poems" / f"{name}.txt")
    run_here("train", "poems", *SETTINGS, "--out", "run", cwd=folder)
    target = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(folder / "run", target / "run")
    run_here(*MORE, cwd=folder)
    shutil.copytree(folder / "run", target / "resumed in place")
    shutil.rmtree(folder)
    return target


@pytest.fixture
def there(moved: Path, cli: Cli) -> Cli:
    """Commands beside a copy of the moved run."""
    shutil.copytree(moved / "run", "run")
    return cli


def test_a_moved_run_samples_with_its_mixture_and_locates_copies(there: Cli) -> None:
    prompt = (REPOSITORY / "data" / "lighthouse.txt").read_text()[3000:3020]
    words = ("--mixture", "-n", "60", "--temperature", "0", "--overlap", "--json", "-p", prompt)
    found = json.loads(there("sample", "run", *words).stdout)
    (overlap,) = found["overlap"]
    for match in overlap["matches"]:
        assert Path(match["path"]).name in ("a.txt", "b.txt")
        lines = (REPOSITORY / "data" / "lighthouse.txt").read_text().split("\n")
        assert match["text"].split("\n")[0] in lines[match["line"] - 1]
    assert overlap["matches"]


def test_a_moved_run_measures_and_compares(there: Cli) -> None:
    nats = json.loads(there("evaluate", "run", "--json").stdout)
    assert 1 < nats["nats_per_char"] < 5
    assert nats["mixture"]["nats_per_char"] < nats["nats_per_char"]
    assert there("score", "run", REPOSITORY / "data" / "lighthouse.txt").returncode == 0
    shutil.copytree("run", "twin")
    assert there("compare", "run", "twin").returncode == 0
    assert there("report", "run").returncode == 0
    assert "poems/" in Path("run/report.html").read_text()
    assert there("verify", "run").returncode == 0
    assert there("explain", "run").returncode == 0


def test_a_moved_run_compresses_and_restores(there: Cli) -> None:
    text = REPOSITORY / "data" / "lighthouse.txt"
    short = Path("short.txt")
    short.write_text(text.read_text()[:200])
    for option in ("--mixture", "--adaptive"):
        assert there("compress", "run", short, "packed", option, "--force").returncode == 0
        assert there("decompress", "run", "packed", "again.txt", "--force").returncode == 0
        assert Path("again.txt").read_bytes() == short.read_bytes()


def test_a_moved_run_resumes_to_the_same_bits_as_in_place(there: Cli, moved: Path) -> None:
    done = there(*MORE)
    assert done.returncode == 0, done.stderr
    assert weights(Path("run")) == weights(moved / "resumed in place")


def test_a_run_of_an_earlier_version_is_given_its_text(cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, "old")
    text = shutil.copy(REPOSITORY / "data" / "lighthouse.txt", "any name.txt")
    assert cli("sample", "old", "-n", "5").returncode == 0
    commands = [
        *(("evaluate", "old"), ("compare", "old", "old"), ("report", "old"), ("explain", "old")),
        *(("sample", "old", "--overlap"), ("train", "--resume", "old", "-s", "train.max_steps=21")),
    ]
    remedy = "give it the same text, under any name, with `chargpt train TEXT --resume --out old`"
    for command in commands:
        assert remedy in refusal(cli(*command))
    Path("other.txt").write_text("quite another text\n" * 99)
    for config in ((), ("-c", "old/config.yaml")):
        other = refusal(cli("train", "other.txt", "--resume", "--out", "old", *config))
        assert "is not the text that the run was trained on" in other
        done = cli("train", text, "--resume", "--out", "old", *config)
        assert "has done all its" in done.stderr
    for command in commands:
        assert cli(*command).returncode == 0
