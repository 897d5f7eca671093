"""Collect the facts of this machine and command line for ``foretoken doctor``; run its checks."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from drafter_svc.drafter_spec import DrafterSpec, name_in, parse_spec
from foretoken import hub
from foretoken.commands import service_settings, speculators, stack_drafters
from foretoken.commands.given import Given
from foretoken.commands.options import DoctorOptions
from foretoken.doctor import gpu, model_files, multi_process, packages, space, torch_build
from foretoken.doctor.finding import Finding, failed, ok, tried, warning
from foretoken.doctor.ports import check_ports
from foretoken.doctor.python import check_python
from foretoken.doctor.sockets import check_sockets
from foretoken.errors import ForetokenError
from foretoken.mps import DRIVER
from gateway.config import GatewaySettings
from verifier_svc.config import VerifierSettings

UNREAD_ADVICE = "compare with the model's card: foretoken does not use them"
# Stand for what the machine's checks do not look at.
_NO_MODEL = {"model": "none", "served_model_names": ("none",)}


def diagnose(given: Given) -> list[Finding]:
    """Run all checks; check a model's files only if MODEL is given.

    Raises ConfigError for a flag's value that no machine takes.
    """
    options = given.settings(DoctorOptions)
    specs: list[DrafterSpec] = []
    of_model: list[Finding] = []
    if options.model is not None:
        specs, of_model = _check_model(given, options)
    return [*_check_machine(given, options, [spec.name for spec in specs]), *of_model]


def _check_machine(given: Given, options: DoctorOptions, drafters: list[str]) -> list[Finding]:
    gateway = given.settings(GatewaySettings, verifiers=("unix:/none",), **_NO_MODEL)
    verifier = given.settings(VerifierSettings, address="unix:/none", drafters=(), **_NO_MODEL)
    has_driver, required = DRIVER.exists(), packages.requirements()
    runs_on_gpu = has_driver and verifier.device != "cpu"
    driver = torch_build.read_driver() if has_driver else ""
    return [
        check_python(sys.version_info[:3], sys.executable),
        packages.check_packages(required, packages.installed_versions(required)),
        torch_build.check_torch(torch_build.read_build(), driver, verifier.device),
        *(gpu.check_gpus(gpu.run_command, verifier.mem_fraction_static) if runs_on_gpu else ()),
        *((multi_process.check_mps(options.mps, multi_process.read_mps(os.environ)),) if runs_on_gpu else ()),
        *((space.check_shm(space.read_space(space.SHM)),) if runs_on_gpu else ()),
        tried("device flags", partial(service_settings.on_device, options, verifier, []), "go with this machine"),
        check_sockets(Path(tempfile.gettempdir()), drafters),
        *check_ports(gateway.host, gateway.port, gateway.grpc_port),
        space.check_disk("temporary files", space.read_space(Path(tempfile.gettempdir()))),
        space.check_disk("hub cache", space.read_space(hub.cache_folder())),
    ]


def _check_model(given: Given, options: DoctorOptions) -> tuple[list[DrafterSpec], list[Finding]]:
    """Return the drafters of a command line, and the findings about target and drafters."""
    findings = [tried("command line", partial(_build_settings, given), "its flags can be used together")]
    try:
        given, said = speculators.expand(given)
        target = hub.cached(given.values["model"], options.revision)
    except ForetokenError as error:
        # Flags are judged without the model.
        specs, mistakes = _parse_drafters(options.drafters)
        return specs, [*_without_ok(findings, mistakes), *mistakes, failed("model", error)]
    options = given.settings(DoctorOptions)
    specs, mistakes = _read_drafters(given, options, said)
    findings = [*_without_ok(findings, mistakes), *mistakes, *(ok("command line", line) for line in said)]
    if target is None:
        return specs, [*findings, _not_downloaded("model", given.values["model"])]
    findings.append(model_files.check_model_files("model", target, model_files.OF_TARGET))
    if findings[-1].level == "fault":
        return specs, findings
    findings.append(_check_target(target))
    for spec in specs:
        findings += _check_drafter(given, spec, target)
    return specs, findings


def _read_drafters(given: Given, options: DoctorOptions, said: list[str]) -> tuple[list[DrafterSpec], list[Finding]]:
    """Return the drafters whose flags can be read, and a fault for each other flag.

    Add notices to ``said``.
    """
    specs, mistakes = _parse_drafters(options.drafters)
    if mistakes:
        # Whether the drafters go together can be judged once all flags can be read.
        return specs, mistakes
    try:
        return stack_drafters.drafter_specs(given, options, said), []
    except ForetokenError as error:
        return specs, [failed("command line", error)]


def _without_ok(findings: list[Finding], mistakes: list[Finding]) -> list[Finding]:
    """Return the findings about the command line; it is not sound if a drafter's flag is wrong."""
    return [found for found in findings if found.level == "fault" or not mistakes]


def _parse_drafters(texts: Sequence[str]) -> tuple[list[DrafterSpec], list[Finding]]:
    specs: list[DrafterSpec] = []
    mistakes: list[Finding] = []
    for text in texts:
        try:
            specs.append(parse_spec(text))
        except ForetokenError as error:
            mistakes.append(failed(_label(text), error))
    return specs, mistakes


def _label(text: str) -> str:
    """Return the check of a --drafter flag that cannot be read: the drafter's, if it has a name."""
    name = name_in(text)
    return f"drafter {name}" if name else "command line"


def _build_settings(given: Given) -> None:
    """Build the settings of gateway and verifier.

    This also reads the files of keys and certificates.
    """
    service_settings.gateway_of_stack(given, verifiers=["unix:/none"])
    service_settings.verifier_settings(given, address="unix:/none", drafters=[])


def _check_files(name: str, check: Callable[[], tuple[str, ...]], found: str) -> Finding:
    """Return ``found`` if ``check`` neither raises a ForetokenError nor returns warnings."""
    try:
        unread = check()
    except ForetokenError as error:
        return failed(name, error)
    return warning(name, "; ".join(unread), UNREAD_ADVICE) if unread else ok(name, found)


def _check_target(folder: Path) -> Finding:
    return _check_files("target", partial(service_settings.check_target, folder), "config and tensors are supported")


def _check_drafter(given: Given, spec: DrafterSpec, target: Path) -> list[Finding]:
    """Check a drafter's files, and that they fit the target.

    Algorithm, sizes, vocabulary and tokenizer must fit.
    """
    name, findings = f"drafter {spec.name}", []
    if spec.model is not None:
        try:
            folder = hub.cached(spec.model)
        except ForetokenError as error:
            return [failed(name, error)]
        if folder is None:
            return [_not_downloaded(name, spec.model)]
        findings.append(model_files.check_model_files(f"{name} files", folder, model_files.OF_HEAD))
        if findings[-1].level == "fault":
            return findings

    def check() -> tuple[str, ...]:
        settings = stack_drafters.drafter_settings(given, spec, "unix:/none")
        return stack_drafters.check_drafter(given, settings, target)

    return [*findings, _check_files(name, check, f"{spec.algorithm} fits the target")]


def _not_downloaded(check: str, model: str) -> Finding:
    return warning(check, f"{model} has not been downloaded", "foretoken serve downloads it; its files are not checked")
