"""Stand-ins for the libraries that PyTorch's CUDA build needs: every name that it asks for, each answering success.

Names and their versions are read from PyTorch's own libraries with readelf. The runtime, the driver and NVML are
written (`runtime/`); of all others a few names answer something else than 0, because their callers look at it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ASKING = (
    *("torch_cuda", "c10_cuda", "torch_python", "torch_cpu", "torch_nvshmem", "caffe2_nvrtc", "torch_cuda_linalg"),
    *("torch", "torch_global_deps"),
)
# Which names without a version belong to which library.
PREFIXES = {
    "libcublas": "cublas(?!Lt)",
    "libcublasLt": "cublasLt",
    "libcudnn": "cudnn",
    "libcusparse": "cusparse(?!Lt)",
    "libcusparseLt": "cusparseLt",
    "libcufft": "cufft",
    "libcufile": "cuFile",
    "libnccl": "nccl",
    "libcurand": "curand",
    "libnvrtc": "nvrtc",
    "libcusolver": "cusolver",
    "libcupti": "cupti",
    "libnvshmem_host": "nvshmem",
    "libcuda": "cu[A-Z](?!FileX)",
    "libcudart": "(__)?cuda",
    "libnvJitLink": "nvJit",
    "libnvtx3interop": "nvtx",
}
CREATED = ("cublasCreate_v2", "cublasLtCreate", "cudnnCreate", "cusolverDnCreate", "cusparseCreate")
ANSWERS = {
    "cublasLtMatmulAlgoGetHeuristic": "int {0}(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int n,"
    " void *results, int *found) {{ *found = 1; return 0; }}",
    "cublasLtGetVersion": "size_t {0}(void) {{ return 130100; }}",
    "cublasGetVersion_v2": "int {0}(void *handle, int *version) {{ *version = 130100; return 0; }}",
    "cudnnGetProperty": "int {0}(int part, int *value) {{ *value = part == 0 ? 9 : part == 1 ? 20 : 0; return 0; }}",
    "cudnnGetVersion": "size_t {0}(void) {{ return 92000; }}",
    "cudnnGetCudartVersion": "size_t {0}(void) {{ return 13000; }}",
    "cudnnGetErrorString": 'const char *{0}(int error) {{ return "error"; }}',
    "nvrtcVersion": "int {0}(int *major, int *minor) {{ *major = 13; *minor = 0; return 0; }}",
    "ncclGetVersion": "int {0}(int *version) {{ *version = 22907; return 0; }}",
    "ncclGetErrorString": 'const char *{0}(int error) {{ return "error"; }}',
    "cuptiGetVersion": "int {0}(unsigned *version) {{ *version = 24; return 0; }}",
} | dict.fromkeys(
    CREATED, "int {0}(void **handle) {{ static long made = 0x1000; *handle = (void *)(made += 64); return 0; }}"
)


@dataclass(frozen=True)
class Asked:
    """Names that PyTorch's libraries want from elsewhere, each with its version (`cudaMalloc@libcudart.so.13`)."""

    libraries: tuple[str, ...]
    names: dict[str, str]

    @classmethod
    def by(cls, folder: Path) -> Asked:
        """Read the libraries in torch/lib."""
        libraries: set[str] = set()
        names: dict[str, str] = {}
        for path in (*(folder / f"lib{name}.so" for name in ASKING), *_bitsandbytes()):
            if path.exists():
                libraries |= set(re.findall(r"NEEDED.*\[(lib[^\]]+)\]", _readelf("-d", path)))
                names |= _undefined(path)
        return cls(tuple(sorted(name for name in libraries if re.match(r"lib(cu|nv|nccl)", name))), names)

    def of(self, library: str) -> dict[str, str]:
        """The names that one library must have."""
        stem = library.partition(".")[0]
        prefix = re.compile(PREFIXES[stem])
        return {
            name: full
            for name, full in self.names.items()
            if f"@{library}" in full
            or ("@" not in full and prefix.match(name))
            or (stem == "libnvshmem_host" and "@NVSHMEM" in full)
        }


def make_libraries(torch_lib: Path, headers: Path, out: Path) -> list[str]:
    """Build every stand-in into `out`; return the libraries' names."""
    out.mkdir(parents=True, exist_ok=True)
    asked = Asked.by(torch_lib)
    unknown = [name for name in asked.libraries if name.partition(".")[0] not in PREFIXES]
    if unknown:
        raise SystemExit(f"this PyTorch needs {', '.join(unknown)}, which libraries.py does not know.")
    makers: list[Callable[[], None]] = [
        lambda library=library: _make(library, asked.of(library), headers, out)  # type: ignore[misc]
        for library in asked.libraries
    ]
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(make) for make in makers]:
            done.result()
    _compile([HERE / "runtime" / "nvml.cpp"], "libnvidia-ml.so.1", None, headers, out)
    return [*asked.libraries, "libnvidia-ml.so.1"]


def _make(library: str, names: dict[str, str], headers: Path, out: Path) -> None:
    stem = library.partition(".")[0]
    written, pattern = {
        "libcudart": ("runtime.cpp", r"^(?:cudaError_t|const char\*|unsigned|void\*?\*?|char) ((?:__)?cuda[A-Z]\w+)\("),
        "libcuda": ("driver.cpp", r"^API (cu[A-Z]\w+)\("),
    }.get(stem, ("", ""))
    sources = []
    made: set[str] = set()
    if written:
        source = HERE / "runtime" / written
        made = set(re.findall(pattern, source.read_text(), re.MULTILINE))
        made |= {f"{name}_v2" for name in made if name in ("cuLinkCreate", "cuLinkAddData")}  # renamed by the header
        sources = [source]
    rest = out / f"{library}.c"
    rest.write_text("#include <stddef.h>\n" + "".join(_answers(sorted(set(names) - made))))
    versions = sorted({full.rpartition("@")[2] for full in names.values() if "@" in full})
    _compile([*sources, rest], library, versions[0] if versions else None, headers, out)


def _answers(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        yield ANSWERS.get(name, "long {0}() {{ return 0; }}").format(name) + "\n"


def _compile(sources: list[Path], library: str, version: str | None, headers: Path, out: Path) -> None:
    objects = []
    for source in sources:
        objects.append(out / f"{library}.{source.stem}.o")
        language = ["g++", "-std=c++17"] if source.suffix == ".cpp" else ["gcc", "-w"]
        _run(*language, "-O1", "-fPIC", "-c", str(source), f"-I{headers}", "-o", str(objects[-1]))
    options = [f"-Wl,-soname,{library}"]
    if version:
        script = out / f"{library}.map"
        script.write_text(f"{version} {{ global: *; }};\n")
        options.append(f"-Wl,--version-script={script}")
    _run("g++", "-shared", *map(str, objects), *options, "-o", str(out / library))


def _bitsandbytes() -> Iterable[Path]:
    """Its library for CUDA 13, where it is installed: it asks for more of the runtime than torch does."""
    found = importlib.util.find_spec("bitsandbytes")
    for folder in found.submodule_search_locations or () if found else ():
        yield from Path(folder).glob("libbitsandbytes_cuda130.so")


def _undefined(path: Path) -> dict[str, str]:
    rows = (line.split() for line in _readelf("--dyn-syms", path).splitlines())
    return {row[7].partition("@")[0]: row[7] for row in rows if len(row) >= 8 and row[6] == "UND"}


def _readelf(what: str, path: Path) -> str:
    return subprocess.check_output(["readelf", what, "-W", str(path)], text=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
