# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Compile CUDA ops ahead of their first use, or without a GPU: `python -m deepspeed_hybrid.ops.compile --arch 9.0`."""

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from deepspeed_hybrid.ops.loader import BUILDERS, builder, find_ninja, library_path


def compile_op(name: str, arch_list: str) -> Path:
    """Build an op for the given architectures, with or without a GPU, and return its library.

    Args:
        name: a key of BUILDERS.
        arch_list: in the form of TORCH_CUDA_ARCH_LIST, e.g. "9.0" or "8.0;9.0".

    Raises:
        ValueError: there is no such op.
        RuntimeError: a compiler is missing, or the sources do not compile.
    """
    find_ninja()
    compiled = type(builder(name))()
    compiled.needs_device = False
    previous = os.environ.get("TORCH_CUDA_ARCH_LIST")
    os.environ["TORCH_CUDA_ARCH_LIST"] = arch_list
    try:
        compiled.jit_load(verbose=False)
    finally:
        if previous is None:
            del os.environ["TORCH_CUDA_ARCH_LIST"]
        else:
            os.environ["TORCH_CUDA_ARCH_LIST"] = previous
    return library_path(name)


def compile_side_by_side(names: Iterable[str], arch_list: str, jobs: int) -> None:
    """Each op in a process of its own, ``jobs`` at a time: an op is one or two files, and nvcc takes a core for each.

    The processes are forks of this one, so that what takes ten seconds to import is imported once.

    Raises:
        RuntimeError: one does not compile.
    """
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        for done in [pool.submit(_compile_and_say, name, arch_list) for name in names]:
            done.result()


def _compile_and_say(name: str, arch_list: str) -> None:
    start = time.perf_counter()
    library = compile_op(name, arch_list)
    print(f"{name}: {library} ({time.perf_counter() - start:.1f} s)", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m deepspeed_hybrid.ops.compile", description=__doc__)
    parser.add_argument("ops", nargs="*", help=f"any of {', '.join(BUILDERS)} (default: all)")
    parser.add_argument("--arch", default="9.0", help="as TORCH_CUDA_ARCH_LIST (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="ops at a time (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.jobs > 1:
        return compile_side_by_side(options.ops or BUILDERS, options.arch, options.jobs)
    for name in options.ops or BUILDERS:
        _compile_and_say(name, options.arch)


if __name__ == "__main__":
    main()
