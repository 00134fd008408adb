"""`chargpt doctor`: checks of this machine."""

from dataclasses import asdict

import typer

from chargpt.analysis.doctor import run_checks
from chargpt.cli import console, options


def doctor(device: options.Device = None, json_: options.Json = False) -> None:
    """Check this machine's device, speed and correctness.

    The exit code is 1 if gradients or decoding are wrong.

    Examples: `chargpt doctor`, `chargpt doctor --device cpu`.
    """
    checks = run_checks(device or "auto")
    if json_:
        console.out_json({"checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            console.out_sentence(f"{check.name:20} {check.value}", hanging=21 * " ")
        advice = [check.advice for check in checks if check.advice]
        for sentence in advice:
            console.out_sentence(f"advice: {sentence}")
        if not advice:
            console.out("all checks passed")
    if any(check.has_failed for check in checks):
        raise typer.Exit(1)
