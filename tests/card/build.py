"""Build the card: `python tests/card/build.py [--torch VERSION] [--out FOLDER]`, or `make card`.

From packages alone: torch's CUDA wheel, Triton at the version that it asks for, and CUDA's headers, downloaded with pip
and unpacked, not installed. Then the stand-in libraries and the arithmetic are compiled. FOLDER/python is Python on the
card. It is built again when a source or a version changes; wheels are downloaded once.

Where it cannot be built (no compiler, no network, another platform, no CUDA build of torch) one sentence says so, and
the exit status is 0: who has no card skips what needs one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.card.libraries import make_libraries  # noqa: E402

TOOLS = ("g++", "gcc", "readelf")
SOURCES = ("*.py", "runtime/*", "arithmetic/*")
PYTHON = """#!/bin/bash
# Written by tests/card/build.py: Python with PyTorch's CUDA build in front of all else, on the card.
here={out}
export CARD_HOME=$here CARD_ARITHMETIC=${{CARD_ARITHMETIC:-small}}
# Triton's interpreter needs kernels that were compiled in the process that runs them.
if [ "$CARD_ARITHMETIC" = all ]; then export TORCHINDUCTOR_COMPILE_THREADS=1; fi
export LD_LIBRARY_PATH=$here/libraries${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}
export PYTHONPATH=$here/torch:$here/triton:$here/start${{PYTHONPATH:+:$PYTHONPATH}}
export TRITON_LIBCUDA_PATH=$here/libraries TRITON_CACHE_DIR=$here/cache/triton
export TORCHINDUCTOR_CACHE_DIR=$here/cache/inductor
export XDG_CACHE_HOME=$here/cache  # "measured" times are not those of the card that it says it is
exec {python} "$@"
"""
ENTRY_POINT = "[torch.backends]\ncard = start:load\n"
METADATA = "Metadata-Version: 2.1\nName: card\nVersion: 0\n"


class NoCard(Exception):
    """The card cannot be built here; the message says why."""


def main() -> None:
    options = _options()
    out = options.out.resolve()
    try:
        build(options.torch, out)
        print(f"the card is built: {out / 'python'}")
    except NoCard as reason:
        print(f"NO CARD: {reason} What needs it is skipped.", file=sys.stderr)


def build(version: str, out: Path) -> None:
    """Build the card for a version of torch in a folder, unless it is there."""
    stamp = out / "stamp"
    wanted = _fingerprint(version)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    _require_tools()
    out.mkdir(parents=True, exist_ok=True)
    _get_packages(version, out)
    make_libraries(out / "torch" / "torch" / "lib", out / "headers", out / "libraries")
    _compile_arithmetic(out)
    _write_start(out)
    stamp.write_text(wanted)


def pinned() -> str:
    """The version of torch that constraints.txt pins."""
    (found,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", default=pinned(), help="version of torch (constraints.txt's)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "card", help="folder (build/card)")
    return parser.parse_args()


def _fingerprint(version: str) -> str:
    found = hashlib.sha256(f"{version} {sys.version} {sys.executable}".encode())
    for path in sorted(path for pattern in SOURCES for path in HERE.glob(pattern)):
        found.update(path.read_bytes())
    return found.hexdigest()


def _require_tools() -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NoCard(f"PyTorch's CUDA build is taken for Linux on x86_64, and this is {platform.platform()}.")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NoCard(f"it is compiled with {', '.join(TOOLS)}, and {', '.join(missing)} is not here.")


def _get_packages(version: str, out: Path) -> None:
    """Unpack torch, Triton and CUDA's headers, unless they are there."""
    have = out / "packages"
    if have.exists() and have.read_text() == version:
        return
    have.unlink(missing_ok=True)
    _unpack(f"torch==={version}", out / "torch")  # not a build with a local version, such as 2.13.0+cpu
    cuda = _cuda_of(out / "torch", version)
    (metadata,) = (out / "torch").glob("torch-*.dist-info/METADATA")
    (triton,) = re.findall(r"^Requires-Dist: triton==([\w.]+)", metadata.read_text(), re.MULTILINE)
    _unpack(f"triton==={triton}", out / "triton")
    _unpack(f"nvidia-cuda-runtime=={cuda}.*", out / "cuda")
    _unpack(f"nvidia-cuda-crt=={cuda}.*", out / "cuda", fresh=False)
    headers = out / "headers"
    headers.unlink(missing_ok=True)
    (found,) = (out / "cuda").glob("nvidia/cu*/include")
    headers.symlink_to(found)
    have.write_text(version)


def _cuda_of(folder: Path, version: str) -> str:
    found = re.search(r"^cuda\b.*= '([\d.]+)'$", (folder / "torch" / "version.py").read_text(), re.MULTILINE)
    if found is None or not (folder / "torch" / "lib" / "libtorch_cuda.so").exists():
        raise NoCard(f"the torch {version} that pip finds here is not a CUDA build.")
    if int(found[1].partition(".")[0]) < 13:
        raise NoCard(f"torch {version} is built for CUDA {found[1]}, and the card answers as CUDA 13.")
    return found[1]


def _unpack(requirement: str, folder: Path, fresh: bool = True) -> None:
    """Download a wheel and unpack it."""
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    wheels = folder.with_name("wheels")
    shutil.rmtree(wheels, ignore_errors=True)
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
    ran = subprocess.run(
        (*command, "--dest", str(wheels), requirement),
        env=_pip_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise NoCard(f"pip cannot download {requirement} ({_last_line(ran.stderr)}).")
    (wheel,) = wheels.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    with zipfile.ZipFile(wheel) as opened:
        for member in opened.infolist():
            path = Path(opened.extract(member, folder))
            if member.external_attr >> 16 & 0o100:  # Triton runs ptxas, and a zip file's modes are not extracted
                path.chmod(0o755)
    shutil.rmtree(wheels)


def _pip_environment() -> dict[str, str]:
    """Pip asks the index that is configured, but no folder of wheels and no constraints: they may want a CPU build."""
    asked = subprocess.run(
        (sys.executable, "-m", "pip", "config", "get", "global.index-url"), capture_output=True, text=True, check=False
    )
    index = {"PIP_INDEX_URL": asked.stdout.strip()} if asked.returncode == 0 and asked.stdout.strip() else {}
    kept = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_CONSTRAINT")}
    return {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **index, **kept, "PIP_CONFIG_FILE": os.devnull}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def _compile_arithmetic(out: Path) -> None:
    torch = out / "torch" / "torch"
    includes = (torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include", out / "headers")
    made = out / "libarithmetic.so"
    subprocess.run(
        (
            *("g++", "-w", "-std=c++20", "-O1", "-g0", "-fPIC", "-shared", str(HERE / "arithmetic" / "arithmetic.cpp")),
            *(f"-I{folder}" for folder in includes),
            *(f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda"),
            *(f"-L{out / 'libraries'}", "-l:libcudart.so.13", "-Wl,--allow-shlib-undefined", "-o", f"{made}.new"),
        ),
        check=True,
    )
    Path(f"{made}.new").replace(made)


def _write_start(out: Path) -> None:
    """Write who starts the arithmetic, as an entry point of torch, and Python on the card."""
    information = out / "start" / "card.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "entry_points.txt").write_text(ENTRY_POINT)
    (information / "METADATA").write_text(METADATA)
    for name in ("start.py", "triton_arithmetic.py"):
        shutil.copy(HERE / name, out / "start" / name)
    python = out / "python"
    python.write_text(PYTHON.format(out=out, python=sys.executable))
    python.chmod(0o755)


if __name__ == "__main__":
    main()
