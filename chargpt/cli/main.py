"""The command line: commands by name, errors as one sentence.

Nothing heavy is imported here: `chargpt --help` has to answer at once, so each command imports
torch and the rest when it runs.
"""

import gc
import io
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer

from chargpt.cli import (
    compare,
    compress,
    console,
    data,
    doctor,
    evaluate,
    explain,
    report,
    sample,
    score,
    train,
    verify,
)
from chargpt.cli.signals import Stopped
from chargpt.errors import ChargptError

# Typer carries its own copy of click in some versions and uses click itself in others; the
# bases of its public exception are right in both.
ClickException: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="chargpt",
    help="Train, sample and measure character-level GPT models.",
    epilog="Start with `chargpt train` (an embedded text) or `chargpt train my.txt`.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("train")(train.train)
app.command("sample")(sample.sample)
app.command("evaluate")(evaluate.evaluate)
app.command("compare")(compare.compare)
app.command("score")(score.score)
app.command("compress")(compress.compress)
app.command("decompress")(compress.decompress)
app.command("explain")(explain.explain)
app.command("report")(report.report)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data")


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        console.out(f"chargpt {version('chargpt')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train, sample and measure character-level GPT models."""


def _explain(error: Any) -> int:
    """Print what was wrong with the words on the line, or the help if there were none."""
    if type(error).__name__ == "NoArgsIsHelpError":
        console.out(error.format_message())
        return 0
    context = getattr(error, "ctx", None)
    hint = f"; see `{context.command_path} --help`" if context else ""
    console.fail(str(error.format_message()).rstrip(".").replace("\n", " ") + hint)
    return 2


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether Python, the CPU's allocator or the GPU's has run out of memory."""
    words = ("can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)


def run() -> NoReturn:
    """Run the command line and leave with its exit code."""
    console.note_start()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ?
    # importing torch makes a million objects that stay: looking for garbage among them, as often
    # as Python does by default, is a fifth of a start
    gc.set_threshold(200_000, 10, 10)
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="chargpt", standalone_mode=False)
    except ChargptError as error:
        console.fail(str(error))
        code = error.exit_code
    except ClickException as error:
        code = _explain(error)
    except (typer.Abort, KeyboardInterrupt):
        console.say("stopped")
        code = 130
    except Stopped as stop:
        console.say("stopped")
        code = 128 + stop.number
    except BrokenPipeError:  # `chargpt sample | head` is no failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        console.fail(
            f"{where}{error.strerror or error}; free the space or set the permission it needs, "
            "then go on (training: with --resume)"
        )
        code = 1
    except Exception as error:
        code = 1
        if _is_out_of_memory(error):
            console.fail(
                "there is not enough memory; lower train.batch_size or raise train.accumulate, or "
                "make the model or its block smaller (training: a saved run goes on with --resume)"
            )
        else:
            if console.is_main():
                traceback.print_exc()
            console.fail(
                "this is a mistake in chargpt and not in what you did; please report it with all "
                "of the above and what `chargpt doctor` prints (training: --resume goes on from "
                "the last checkpoint)"
            )
    together = sys.modules.get("torch.distributed")
    if together is not None and together.is_initialized():
        # it failed among others: taking apart what ties it to them may wait for them for ever
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 0)
    gc.freeze()  # nor is there anything to find on the way out
    sys.exit(code if isinstance(code, int) else 0)
