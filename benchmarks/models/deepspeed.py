"""DeepSpeed's ZeRO-3 as a peer: how it is started, and its settings with everything on NVMe."""

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.case import CannotRunError
from benchmarks.harness.ranks import torchrun_environments

#: Of a case: DeepSpeed would look for a GPU and its compiler.
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"}


def start_deepspeed(*, on_disk: bool = True) -> Any:
    """The module, with a process group of the ranks of this case, or of this process alone.

    Its AdamW for the CPU and, for files, its asynchronous I/O library are compiled at the first use.

    Raises:
        CannotRunError: if they cannot be compiled here.
    """
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # ninja
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        raise CannotRunError("its libraries are compiled at the first use, and there is no ninja or no C++ compiler")
    theirs: Any = importlib.import_module("deepspeed")
    if on_disk and not theirs.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False):
        raise CannotRunError("its I/O library cannot be compiled here; install the headers of libaio (libaio-dev)")
    if "RANK" not in os.environ:
        os.environ.update(torchrun_environments(1)[0])
    theirs.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return theirs


def deepspeed_nvme(folder: Path, *, buffers: int, largest: int, block: int, live: int) -> dict[str, Any]:
    """Settings with parameters and optimizer in files of ``folder``.

    ``buffers`` of ``largest`` elements hold parameters, of which ``live`` elements stay; gradients are reduced and
    updated by ``block`` elements.
    """
    on_disk = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False}
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**on_disk, "buffer_count": buffers, "buffer_size": largest},
            "offload_optimizer": {**on_disk, "buffer_count": 4},
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "stage3_prefetch_bucket_size": 0,
            "reduce_bucket_size": block,
            "sub_group_size": block,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "thread_count": 1, "overlap_events": True},
    }
