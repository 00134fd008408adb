"""`chargpt doctor`: what this machine is, and what would make it better."""

import json
from dataclasses import asdict

from chargpt.analysis.doctor import examine
from chargpt.cli import console, options


def doctor(device: options.Device = None, json_: options.Json = False) -> None:
    """Check this machine's device, speed and correctness.

    Device, number format, threads, speed, correctness, disk.

    Examples: `chargpt doctor`, `chargpt doctor --device cpu`.
    """
    findings = examine(device or "auto")
    if json_:
        console.out(json.dumps({"findings": [asdict(finding) for finding in findings]}))
        return
    for finding in findings:
        console.out(f"{finding.name:20} {finding.value}")
    advice = [finding.advice for finding in findings if finding.advice]
    for sentence in advice:
        console.out(f"advice: {sentence}")
    if not advice:
        console.out("nothing to improve that chargpt knows of")
