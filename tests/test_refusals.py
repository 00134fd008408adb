"""What commands refuse: one sentence with cause and remedy, and the exit code."""

import shlex
import shutil
from pathlib import Path

import pytest
from conftest import Cli

FILES: dict[str, bytes] = {  # of the folder in which the commands are run
    "a.txt": b"the sea\n",
    "b.txt": b"the sea\n",
    "a.svg": b"the sea\n",
    "other.txt": "The light, the sea, the night. Ж".encode() * 20,
    "empty.txt": b"",
    "forty.txt": b"It is only forty characters, and no more",
    "binary.txt": bytes(range(256)) * 40,
    "windows.txt": b"caf\xe9 and \x92quotes\x92 " * 200,
    "notes/notes.md": b"my own",
    "both/gpt/notes.md": b"my own",
    "my novel.txt": b"the sea\n",
}
# TEXT is a text, and RUN a finished run of 40 steps on it
REFUSALS = [
    # commands, options and arguments of other tools
    ("doctor x", 2, "extra argument(s) (x)", "see `chargpt doctor --help`"),
    ("resume b.txt", 2, "'resume': it is `chargpt train --resume b.txt`", "; see `chargpt --help`"),
    ("eval RUN --json", 2, "'eval': it is `chargpt evaluate /", " --json`"),
    ("chat", 2, "'chat'", "it is `chargpt sample --interactive`"),
    ("help train", 2, "'help'", "it is `chargpt train --help`"),
    ("generate -p 'a b'", 2, "'generate'", "it is `chargpt sample -p 'a b'`"),
    ("a.txt", 2, "No such command 'a.txt'", "it is `chargpt train a.txt`"),
    ("RUN", 2, "No such command", "it is `chargpt sample /"),
    ("trian", 2, "No such command", "Did you mean 'train'?"),
    ("export RUN", 2, "No such command", "one of hf, gguf, onnx, html follows `chargpt export`"),
    ("train --frobnicate", 2, "No such option", "see `chargpt train --help`"),
    ("train a.txt --lr 0.1", 2, "chargpt: --lr 0.1 is -s optim.lr=0.1", "`chargpt train --help`"),
    ("train --learning-rate=0.1", 2, "--learning-rate 0.1 is", "-s optim.lr=0.1;"),
    ("train -lr", 2, "-lr is", "-s optim.lr=VALUE"),
    ("train --batch-size 4", 2, "--batch-size 4 is", "-s train.batch_size=4"),
    ("train --batchsize 4", 2, "--batchsize 4: did you mean", "-s train.batch_size=4?"),
    ("train --epochs 3", 2, "no epochs", "-s train.max_steps=500 or --budget 10m"),
    ("train --gpu a.txt", 2, "--gpu is", "--device cuda;"),
    ("train --file a.txt", 2, "chargpt: give the text", "as an argument; see"),
    ("train --run RUN", 2, "--from RUN starts from the weights", "--resume RUN continues"),
    ("sample --ckpt RUN", 2, "chargpt: give the run", "as an argument; see"),
    ("compare --run RUN", 2, "chargpt: give the run", "as an argument; see"),
    ("sample --text Once", 2, "chargpt: --prompt TEXT", "--prompt-file FILE is a prompt"),
    ("doctor --model RUN", 2, "chargpt: No such option: --model;", "see `chargpt doctor --help`"),
    ("train --best 3", 2, "chargpt: No such option: --best;", "see `chargpt train --help`"),
    ("train --seeds 3", 2, "`chargpt compare TEXT --seeds 3`", "a model with each seed"),
    ("train --name my", 2, "--name my is", "--out runs/my;"),
    (
        "train --resume=RUN",
        2,
        "--resume takes no value",
        "`chargpt train --resume RUN` resumes a run",
    ),
    ("train --json=true", 2, "--json takes no value", "drop the value"),
    ("--budget 9s train a.txt", 2, "options follow", "write `chargpt train a.txt --budget 9s`"),
    ("train a.txt –budget 9s", 2, "– is no -", "write --budget 9s;"),
    ("train −−budget=9s", 2, "− is no -", "write --budget=9s;"),
    ("sample RUN -p —Oui —n 20 --json", 2, "— is no -", "write -n 20;"),
    ("data –help", 2, "– is no -", "write --help;"),
    ("train a.txt optim.lr=0.1", 2, "(optim.lr=0.1)", "is -s optim.lr=0.1;"),
    ("train a.txt max_steps=5", 2, "(max_steps=5)", "is -s train.max_steps=5;"),
    ("train a.txt -s optim.lr 0.1", 2, "(0.1)", "is -s optim.lr=0.1;"),
    ("train a.txt -s optim.lr = 0.1", 2, "(= 0.1)", "is -s optim.lr=0.1;"),
    ("data download a", 2, "'download'", "it is `chargpt data get a`"),
    ("info RUN", 2, "'info'", "it is `chargpt report /"),
    ("train --model gpt2", 2, "--model gpt2 is", "--config gpt2"),
    ("train -v", 2, "there is no verbose mode", "all messages are printed"),
    ("sample --model RUN", 2, "give the run", "as an argument"),
    ("sample --max-new-tokens 9", 2, "--max-new-tokens 9 is", "--length 9"),
    ("sample --top_k 3", 2, "--top_k 3 is", "--top-k 3"),
    ("sample --repetition-penalty 2", 2, "no repetition penalty", "--temperature 1 repeats less"),
    ("sample --lr 1", 2, "No such option: --lr", "see `chargpt sample --help`"),
    ("train a.txt 500", 2, "(500)", "-s train.max_steps=500 or --budget 10m says"),
    ("train a.txt 10m", 2, "(10m)", "or --budget 10m says how long to train"),
    ("evaluate RUN --text my novel.txt", 2, "(novel.txt)", "needs quotes: 'my novel.txt';"),
    ("train my novel.txt", 2, "what has spaces needs quotes", "'my novel.txt'"),
    ("sample RUN 'Once upon'", 2, "(Once upon)", "-p 'Once upon' is a prompt"),
    ("sample RUN -p Once upon -n 5", 2, "(upon)", "needs quotes: 'Once upon';"),
    # texts
    ("train emptv.txt", 2, "emptv.txt; did you mean", "empty.txt?"),
    (
        "train tinyshakespeare",
        2,
        "is not in data yet",
        "fetch it with `chargpt data get tinyshakespeare`",
    ),
    ("train empty.txt", 2, "empty.txt is empty", "give a text"),
    ("train forty.txt", 2, "holds 40 characters", "give a longer text"),
    ("train binary.txt", 2, "is binary", "name a text"),
    ("train windows.txt", 2, "byte 0xE9 at offset 3", "--encoding-errors replace"),
    ("train a.txt b.txt", 2, "extra argument(s) (b.txt)", "such as '*.txt' needs quotes"),
    ("train a.txt --budget 5 min -c b.txt", 2, "(min)", "write --budget 5m;"),
    # settings
    ("train TEXT -s train.max_step=5", 2, "train.max_step", "did you mean train.max_steps?"),
    ("train TEXT -s max_steps=5", 2, "max_steps", "did you mean train.max_steps?"),
    ("train TEXT -s nonsense", 2, "nonsense", "section.key=value"),
    ("train TEXT -s train.batch_size=0", 2, "train.batch_size", "expected at least 1"),
    ("train TEXT -c gtp", 2, "gtp", "gpt"),
    ("train TEXT --device tpu", 2, "tpu", "auto, cpu, cuda"),
    ("train TEXT -s model.n_embd=65536 -s model.n_head=2", 2, "GB of memory", "its batch smaller"),
    ("train TEXT -s train.batch_size=1000000000", 2, "GB of memory", "its batch smaller"),
    ("train TEXT --budget soon", 2, "soon", "is not a duration"),
    (
        "train TEXT --budget 9s -s train.max_steps=5",
        2,
        "a budget and train.max_steps both",
        "drop one",
    ),
    # runs that exist
    ("train TEXT --out RUN", 2, "exists", "--resume"),
    ("train TEXT --out RUN", 2, "exists", "--force"),
    ("train TEXT --out notes", 2, "holds 'notes.md'", "name another folder"),
    ("train TEXT --resume RUN", 2, "unexpected extra", "`chargpt train --resume RUN`"),
    ("train TEXT --out x --resume --force", 2, "--resume continues", "give one of them"),
    ("train TEXT -s optim.lr=1,2", 2, "a number (it is '1,2')", "`chargpt compare TEXT -s optim"),
    ("train TEXT -s optim.lr=0,05", 2, "a number (it is '0,05')", "write 0.05"),
    ("train TEXT -s train.max_steps=1,000,000", 2, "a number (it is", "write 1000000"),
    ("train TEXT -s train.max_steps=1,500", 2, "write 1500 if it is one; ", "max_steps=1,500`"),
    (
        "train a.txt --out --json",
        2,
        "Option '--out' requires an argument",
        "`chargpt train --help`",
    ),
    ("train a.txt --budget --seed 3", 2, "Option '--budget' requires an argument", ""),
    ("sample RUN -p -n 5", 2, "(5)", ""),
    ("train a.txt -o=runs/a", 2, "a short option has no =: write -o runs/a", ""),
    ("train a.txt --budget=10 s", 2, "(s)", "write --budget 10s"),
    ("train a.txt bigram", 2, "(bigram)", "-c bigram is a config"),
    ("train a.txt --init_from=resume", 2, "--init_from is --resume RUN", ""),
    ("train a.txt --time 10s", 2, "--time 10s is --budget 10s", ""),
    ("train a.txt --minutes 3", 2, "--minutes 3 is --budget 3m", ""),
    ("train a.txt -s budget=10s", 2, "budget is not a setting", "budget is --budget"),
    ("train a.txt -c RUN", 2, "no config", "config.yaml?"),
    ("sample RUN --ckpt best", 2, "--ckpt best is --checkpoint best", ""),
    ("sample RUN RUN nothing", 2, "extra argument(s) (nothing)", "-p nothing is a prompt"),
    ("sample RUN runs/nothing", 2, "there is no folder runs/nothing", "or name another"),
    ("score RUN --text a.txt", 2, "give the file as an argument", ""),
    ("compress a.txt RUN packed", 2, "a.txt is a file, not a run", "and the text after it"),
    ("compare TEXT --out a.txt", 2, "a.txt is a file", "name another folder with --out"),
    ("compare TEXT --models bigram, gpt", 2, "no file or folder gpt", "write --models bigram,gpt"),
    ("export pt RUN", 2, "one of hf, gguf, onnx, html follows", "see `chargpt export --help`"),
    ("config a.txt", 2, "a.txt is a file", "-c a.txt shows the values of a config"),
    ("train --resume", 2, "no run under runs/", "train one with `chargpt train`"),
    ("train --resume RUN", 2, "has done all its 40 steps", "train.max_steps"),
    ("train --resume RUN -s train.max_steps=30", 2, "has done all its 40 steps", ""),
    ("train --resume RUN -s seed=3", 2, "seed cannot change", ""),
    ("train RUN", 2, "is a run, not a text; name a text", "`chargpt train --resume /"),
    ("train --resume RUN -c gpt", 2, "keeps its text and settings", "drop the config"),
    ("train --resume RUN --budget 9s -s train.max_steps=9", 2, "both say how long", "drop one"),
    # sample
    ("sample", 2, "no run under runs/", "train one with `chargpt train`"),
    ("sample nowhere", 2, "there is no folder nowhere", "or name another"),
    ("sample RUN a.txt", 2, "extra argument(s) (a.txt)", "--prompt-file a.txt is a prompt"),
    ("sample RUN -p 'The ж'", 2, "U+0436", "--unknown skip"),
    ("sample RUN -p a --prompt-file a.txt", 2, "exclude each other", "give one"),
    ("sample RUN --unknown guess", 2, "'guess'", "'error', 'skip', 'replace'"),
    ("sample RUN -n abc", 2, "'-n' / '--length'", "integer"),
    ("sample RUN -n 0", 2, "--length", "expected a number of 1 or more"),
    ("sample RUN --top-p 0", 2, "--top-p", "expected greater than 0"),
    ("sample RUN --top-p 1.5", 2, "--top-p", "expected a number from 0 to 1"),
    ("sample RUN --seed 9223372036854775808", 2, "--seed", "expected less than 2^63"),
    ("sample RUN --num-samples 5000", 2, "--num-samples", "from 1 to 4096"),
    ("sample RUN -i --json", 2, "--json does not apply to --interactive", "drop it"),
    ("sample RUN --encoding utf-8", 2, "--encoding is that of a --prompt-file", "drop it"),
    ("sample RUN --mix 0.3", 2, "there are 0 of them and 1 weights", "sample A B --mix 0.3`"),
    ("sample RUN RUN --mix 0.3 --mix 0.3", 2, "there are 1 of them and 2", "give one for each"),
    ("sample RUN RUN RUN --mix 0.7 --mix 0.7", 2, "--mix sum to 1.4", "lower them"),
    ("sample RUN RUN --mix 1.5", 2, "--mix", "from 0 to 1"),
    ("score RUN a.txt --with RUN --adaptive", 2, "--adaptive lets one run learn", "drop it"),
    # evaluate
    ("evaluate RUN a.txt", 2, "extra argument(s) (a.txt)", "--text FILE names another text"),
    ("evaluate RUN --text other.txt", 2, "U+0416", "--unknown skip"),
    ("evaluate RUN --unknown skip", 2, "--unknown applies to another text of --text", "drop it"),
    ("evaluate RUN --text a.txt --split train", 2, "--split applies to the run's text", "drop it"),
    ("evaluate RUN --split test", 2, "test", "text.test_fraction"),
    ("evaluate RUN --stride 3", 2, "only to --protocol sliding", "drop it"),
    # compare
    ("compare TEXT --models bigram,lstm", 2, "no config 'lstm'", "the shipped ones are bigram"),
    ("compare TEXT --out both", 2, "both/gpt exists", "name another folder with --out"),
    ("compare TEXT --ladder --budget 6s", 2, "--budget does not apply to --ladder", "drop it"),
    ("compare TEXT --resume", 2, "--resume continues a stopped", "name its folder with --out"),
    ("compare TEXT -o x --budget 6s --resume", 2, "--resume does not apply to --budget", "drop it"),
    ("compare TEXT --csv - --json", 2, "both print on stdout", "name a file"),
    ("compare RUN --csv a.txt", 2, "was not made by chargpt", "name another file"),
    ("compare RUN --split test", 2, "has no test split", "-s text.test_fraction=0.1"),
    ("compare TEXT -s model.kind=gpt,x", 2, "model.kind: expected", "'x'"),
    ("compare TEXT -s optim.lr=1,2,3,4,5,6,7 --seeds 10", 2, "70 trainings", "fewer values"),
    ("compare RUN TEXT", 2, "is not a run", "give one text, or only runs"),
    ("compare a.txt b.txt --models gpt", 2, "a.txt is not a run", "give one text, or only runs"),
    ("compare RUN zzz", 2, "there is no file or folder zzz", "or only runs"),
    ("compare TEXT --models bigram gpt", 2, "no file or folder gpt", "write --models bigram,gpt"),
    ("compare RUN --plot x.jpg", 2, "x.jpg must end in .svg or .png", "rename it"),
    ("compare RUN --budget 1m", 2, "--budget applies to training", "drop it"),
    ("compare RUN -s model.n_layer=2", 2, "-s (or --seed, --val", "drop it"),
    # plan
    ("plan a.txt --link 5", 2, "--link applies to a plan on paper, with --gpus N", "drop it"),
    ("plan a.txt --gpus 0", 2, "--gpus", "expected a number from 1"),
    ("plan a.txt --gpus 2 --gpu x", 2, "--gpu x is not known", "t4, a100, h100, h200"),
    ("plan a.txt --gpus 2 --link nan", 2, "--link nan is not a bandwidth", "above 0"),
    ("plan a.txt --gpus 2 --characters nan", 2, "--characters nan is not from 1,000", "correct it"),
    ("plan a.txt -c bigram", 2, "predicts the loss of model.kind=gpt", "drop it"),
    # others
    ("report RUN --out a.txt", 2, "was not made by chargpt", "name another file"),
    ("play RUN --out a.txt", 2, "was not made by chargpt", "name another file"),
    ("report RUN --out notes", 2, "notes is a folder", "name a file in it"),
    ("explain RUN --html a.txt", 2, "was not made by chargpt", "name another file"),
    ("explain RUN --plot a.svg", 2, "was not made by chargpt", "name another file"),
    ("compare RUN --plot a.svg", 2, "was not made by chargpt", "name another file"),
    ("explain RUN --encoding utf-8", 2, "--encoding-errors applies to a text, and", "drop it"),
    (
        "explain TEXT --plot a.png",
        2,
        "the section attention of a trained gpt",
        "name the run of one",
    ),
    ("compress RUN none.txt packed", 2, "there is no file none.txt", "correct the path"),
    ("compress RUN other.txt packed", 2, "U+0416", "--unknown skip or replace"),
    ("compress RUN TEXT a.txt", 2, "a.txt exists", "--force"),
    ("decompress RUN TEXT a.txt", 2, "a.txt exists", "--force"),
    ("runs .", 2, "there is no run in .", "train one with `chargpt train`"),
    ("runs missing", 2, "there is no folder missing", "name another folder"),
    ("config epochs", 2, "there are no epochs", "-s train.max_steps=500 or --budget 10m"),
    ("config output", 2, "output is not", "output is --out"),
    ("config learning_rate", 2, "learning_rate is not", "did you mean optim.lr?"),
    ("config n_layers", 2, "n_layers is not a setting", "did you mean model.n_layer?"),
    ("data get tinyshakespere", 2, "no text named", "did you mean tinyshakespeare?"),
    ("data get python-docs", 2, "is built in", "without TEXT"),
]


@pytest.mark.parametrize(
    ("line", "code", "cause", "remedy"), REFUSALS, ids=[row[0] for row in REFUSALS]
)
def test_the_message_has_cause_and_remedy(
    line: str, code: int, cause: str, remedy: str, trained: Path, verse: Path, cli: Cli
) -> None:
    for name, content in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    before = sorted(Path().rglob("*"))
    words = {"RUN": trained, "TEXT": verse}
    done = cli(*(words.get(word, word) for word in shlex.split(line)))
    assert done.returncode == code, done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("chargpt: ")]
    assert cause in message
    assert remedy in message
    assert sorted(Path().rglob("*")) == before, "nothing is written"


def test_a_run_that_is_not_named_in_full_is_found_by_its_name(trained: Path, cli: Cli) -> None:
    shutil.copytree(trained, "runs/one")
    for wrong, remedy in (("one", "did you mean runs/one?"), ("runs", "such as runs/one")):
        assert remedy in cli("sample", wrong).stderr
    assert "runs is a folder of runs, not a text; name a text" in cli("train", "runs").stderr
