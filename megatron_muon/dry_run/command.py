"""``python -m megatron_muon.plan``: dry-runs one rank of each pipeline stage of a command."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_muon.dry_run import fake_cuda
from megatron_muon.dry_run.devices import CAPABILITIES, DEVICES, Device, device_of
from megatron_muon.dry_run.prediction import predict, recommendations
from megatron_muon.dry_run.script import REMOVED
from megatron_muon.dry_run.stage import Job, StageResult, run_stages
from megatron_muon.dry_run.text import plot, render
from megatron_muon.integration.support import ConfigurationError
from megatron_muon.integration.versions import MegatronVersionError, require_megatron

FORMAT = "megatron_muon plan 1"


def main(argv: Sequence[str]) -> int:
    """Dry-run a command: our flags, the script, its arguments.

    Returns:
        Exit code: 2 if a real run would be refused; the script's own if it fails.
    """
    options, unknown = _parser().parse_known_args(argv)
    try:
        device = _checked(options, unknown)
        require_megatron(training=True)
        _import_megatron(CAPABILITIES[options.gpu])
        results, elsewhere = _all_stages(options)
    except (ValueError, MegatronVersionError) as error:
        print(error, file=sys.stderr)
        return 2
    for result in results:
        if result.failure is not None:
            code, output = result.failure
            print(output.rstrip(), file=sys.stderr)
            print("The script ended before it built its optimizer: see above.", file=sys.stderr)
            return code
    report = merge(results, options, device) | {"rules_of_other_experts": sorted(elsewhere)}
    print(render(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot(report, options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_muon.plan",
        description="Dry-run a training command at its real size, on a machine without GPU.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--world-size", type=int, metavar="N", help="number of GPUs")
    add(
        "--ranks-per-node",
        type=int,
        default=8,
        metavar="N",
        help="ranks linked by NVLink; default: 8",
    )
    add(
        "--gpu",
        choices=sorted(DEVICES),
        default="h100",
        help="selects kernels and predicted times; default: h100",
    )
    add("--cost-table", metavar="FILE", help="JSON that overrides modelled rates")
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add("--plot", metavar="FILE", help="draw load and memory of every rank (needs matplotlib)")
    add("command", nargs=argparse.REMAINDER, help="pretrain_gpt.py and its arguments")
    return parser


def _checked(options: argparse.Namespace, unknown: Sequence[str]) -> Device:
    """Check our flags and return the rates of the device; raise ValueError with all errors."""
    if unknown:
        raise ValueError("\n".join(_unknown_flag(word) for word in unknown))
    if options.world_size is None:
        raise ValueError("--world-size is missing: type --world-size and the number of GPUs")
    problems = [
        f"--{name} is {value}: type a number of at least 1"
        for name, value in (
            ("world-size", options.world_size),
            ("ranks-per-node", options.ranks_per_node),
        )
        if value < 1
    ]
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
            problems.append(f"{flag} {path} is not a file in an existing folder")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        problems.append("--plot requires matplotlib: type pip install matplotlib")
    if not options.command or options.command[0].startswith("-"):
        problems.append("no script given: type pretrain_gpt.py and its arguments after our flags")
    elif not os.path.isfile(options.command[0]):
        problems.append(f"script {options.command[0]} does not exist")
    try:
        device = device_of(options.gpu, options.cost_table)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return device


def _unknown_flag(word: str) -> str:
    ours = [flag for action in _parser()._actions for flag in action.option_strings]
    near = difflib.get_close_matches(word.split("=")[0], ours, n=1)
    advice = f"did you mean {near[0]}?" if near else "type flags of a script after the script"
    return f"{word} is not a flag of python -m megatron_muon.plan: {advice}"


def _import_megatron(capability: tuple[int, int]) -> None:
    """Import Megatron before the stages' processes are forked."""
    fake_cuda.install(capability=capability)
    with warnings.catch_warnings():
        # Transformer Engine and Apex are absent.
        warnings.simplefilter("ignore")
        for module in ("megatron.training", "megatron_muon.integration.builder"):
            importlib.import_module(module)


def _all_stages(options: argparse.Namespace) -> tuple[list[StageResult], frozenset[str]]:
    """Return one rank's result per stage, and rules that match only experts of other ranks.

    Raises:
        ConfigurationError: As on every rank of a real run.
    """
    job = Job(
        command=tuple(options.command),
        world_size=options.world_size,
        ranks_per_node=options.ranks_per_node,
        rank=0,
        capability=CAPABILITIES[options.gpu],
    )
    _report_progress("stage 1: building the model, counting one step")
    (first,) = run_stages([job])
    jobs = [job, *(replace(job, rank=rank) for rank in first.pipeline[1:])]
    results = [first]
    for result in run_stages(jobs[1:]):
        results.append(result)
        _report_progress(f"{len(results)} of {len(jobs)} stages counted")
    unmatched_here = unmatched = frozenset.intersection(*(r.unmatched for r in results))
    if unmatched:
        # Other ranks have other experts.
        ranks = [rank for result in results for rank in result.experts[1:]]
        for result in run_stages([replace(job, rank=r, only_rules=True) for r in ranks]):
            unmatched &= result.unmatched
            if not unmatched:
                break
    if unmatched:
        # The rules match in no stage, which is known only now; let the first stage refuse them.
        results += run_stages([replace(job, unmatched=unmatched)])
    if refused := [result for result in results if result.problems]:
        earliest = min(result.checks for result in refused)
        found = [p for result in refused if result.checks == earliest for p in result.problems]
        raise ConfigurationError(list(dict.fromkeys(found)))
    return results, unmatched_here - unmatched


def _report_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def merge(
    results: Sequence[StageResult], options: argparse.Namespace, device: Device
) -> dict[str, Any]:
    """Return the report as plain data, as written by ``--json``."""
    from megatron_muon.integration.report import startup_report

    stages = [result.report for result in results if result.report is not None]
    settings = results[0].settings
    everyone = []
    for result, stage in zip(results, stages, strict=True):
        groups = {group["domain"]: group["groups_in_stage"] for group in stage["groups"]}
        for summary in result.summaries:
            # Each group of experts has one summary, and all are equal.
            copies = groups.get(summary.domain, 1) if summary.domain == "expert" else 1
            everyone += [summary] * copies
    prediction = predict(stages, device, options.world_size)
    return {
        "format": FORMAT,
        "world_size": options.world_size,
        "ranks_per_node": options.ranks_per_node,
        "command": options.command,
        "optimizer": settings.optimizer,
        "flags_set": results[0].flags_set,
        "stand_ins": list(dict.fromkeys(text for r in results for text in r.stand_ins)),
        "flags_removed": [word for word in options.command if word in REMOVED],
        "table_at_start": startup_report(settings, everyone),
        "stages": stages,
        "gpu": options.gpu,
        "device": asdict(device),
        "prediction": prediction,
        "recommendations": recommendations(stages, settings, prediction),
    }
