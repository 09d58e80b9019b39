"""Lets the CUDA build of torch in this environment run on the CPU without the CUDA libraries, which are gigabytes.

torch is linked to them, but calls next to nothing of them on a machine without a GPU. One small library takes their
place: it has every symbol that torch looks for, and each call returns 100, "no CUDA device is detected".
"""

import re
import subprocess
import sysconfig
from pathlib import Path

FOLDER = Path(sysconfig.get_paths()["purelib"], "torch", "lib")
SYMBOL = re.compile(r"(?:__)?(?:cuda|cublas|cudnn|cufft|cuFile|cupti|curand|cusolver|cusparse|nccl)\w*")
LIBRARY = re.compile(r"\[(lib(?:cu|nccl)[^\]]*)\]")


def printed(*command: object) -> str:
    """What a command prints."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


symbols: dict[str, set[str]] = {}  # by the version that is asked for
missing: set[str] = set()
for path in FOLDER.glob("lib*.so"):
    if path.is_symlink() or "nvrtc" in path.name:  # that one is loaded on a GPU only
        continue
    missing |= {name for name in LIBRARY.findall(printed("readelf", "-d", path)) if not (FOLDER / name).is_file()}
    for word in printed("nm", "-D", "--undefined-only", path).split():
        name, _, version = word.partition("@")
        if SYMBOL.fullmatch(name):
            symbols.setdefault(version, set()).add(name)
source, versions = FOLDER / "no_cuda.c", FOLDER / "no_cuda.map"
names = sorted(set().union(*symbols.values()))
source.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in names))
versions.write_text("".join(f"{v} {{ global: {'; '.join(sorted(found))}; }};\n" for v, found in symbols.items() if v))
stub = FOLDER / "no_cuda.so"
printed("gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", stub, source, f"-Wl,--version-script={versions}")
for name in missing:
    (FOLDER / name).symlink_to(stub.name)
