"""The machine's GPUs, as nvidia-smi reports them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretoken.doctor.finding import Finding, fault, ok, warning

# The kernels are written for tensor cores with bfloat16 and float16.
MIN_CAPABILITY = (8, 0)
_GIB_PER_MIB = 1 / 1024
_TIMEOUT_S = 20.0
_FIELDS = ("index", "uuid", "name", "compute_cap", "memory.total", "memory.free")
_PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int
    name: str
    # None: the driver does not say, as in a container.
    memory_gib: float | None


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]
    total_gib: float
    free_gib: float
    processes: tuple[GpuProcess, ...] = ()


def check_gpu(gpu: Gpu, share: float) -> Finding:
    """Judge one GPU. ``share``: of its memory, as ``--mem-fraction-static``."""
    name = f"GPU {gpu.index}"
    found = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
    found += f"{gpu.free_gib:.1f} of {gpu.total_gib:.1f} GiB free"
    if gpu.capability < MIN_CAPABILITY:
        return fault(
            name, found, "8.0 or later is needed: select another GPU with CUDA_VISIBLE_DEVICES, or --device cpu"
        )
    if gpu.processes:
        others = ", ".join(f"{process.name} ({process.pid}{_held(process)})" for process in gpu.processes)
        return warning(name, f"{found}; used by {others}", "end them, or lower --mem-fraction-static")
    if gpu.free_gib < share * gpu.total_gib:
        advice = f"--mem-fraction-static {share:g} will not fit: lower it"
        return warning(name, f"{found}, though no process is visible", advice)
    return ok(name, found)


def _held(process: GpuProcess) -> str:
    return "" if process.memory_gib is None else f", {process.memory_gib:.1f} GiB"


def read_gpus(run: Callable[[Sequence[str]], str]) -> list[Gpu]:
    """Return the GPUs with their processes. ``run`` returns a command's output.

    Raises ValueError for an answer of another form.
    """
    processes: dict[str, list[GpuProcess]] = {}
    for uuid, pid, name, memory in _rows(run, "compute-apps", _PROCESS_FIELDS):
        held = float(memory) * _GIB_PER_MIB if memory.replace(".", "").isdigit() else None
        processes.setdefault(uuid, []).append(GpuProcess(int(pid), name.rpartition("/")[2], held))
    gpus = []
    for index, uuid, name, capability, total, free in _rows(run, "gpu", _FIELDS):
        major, minor = map(int, capability.split("."))
        memory_gib = float(total) * _GIB_PER_MIB, float(free) * _GIB_PER_MIB
        gpus.append(Gpu(int(index), uuid, name, (major, minor), *memory_gib, tuple(processes.get(uuid, ()))))
    return gpus


def _rows(run: Callable[[Sequence[str]], str], what: str, fields: Sequence[str]) -> list[list[str]]:
    output = run(("nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"))
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    for row in rows:
        if len(row) != len(fields):
            raise ValueError(f"nvidia-smi answers {', '.join(row)}")
    return rows


def check_gpus(run: Callable[[Sequence[str]], str], share: float) -> list[Finding]:
    """Return a finding for each GPU, or one that says why there is none."""
    try:
        gpus = read_gpus(run)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [warning("GPU", f"nvidia-smi does not answer: {error}", "install it to see memory and other processes")]
    if not gpus:
        return [fault("GPU", "nvidia-smi shows none", "look at the driver's log (dmesg), or use --device cpu")]
    return [check_gpu(gpu, share) for gpu in gpus]


def run_command(words: Sequence[str]) -> str:
    """Return a command's output. Raises OSError or SubprocessError."""
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout
