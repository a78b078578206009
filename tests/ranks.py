# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Two processes over gloo that run functions of test files side by side; run as a script, this file is one of them.

The processes stay for many calls, since starting them takes longer than what they do.
"""

import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

RANKS = 2
START_SECONDS = 120
COLLECTIVE_SECONDS = 60  # a rank that waits for longer than this raises


class Ranks:
    """The processes, started at the first call and after one that failed."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen] = []
        self._logs: list = []

    def run(self, function: str, timeout: float = 120, **arguments) -> list:
        """What ``module:name`` returns on each rank, as JSON has it. Asserts that no rank raises or takes longer."""
        replies = self.replies(function, timeout, **arguments)
        failures = [f"rank {rank}: {reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
        if failures:
            self.stop()
            raise AssertionError("\n\n".join(failures))
        return [reply["result"] for reply in replies]

    def replies(self, function: str, timeout: float = 120, deaths: bool = False, **arguments) -> list[dict]:
        """Like ``run``, with what a rank raised as its ``error``, and the seconds it took; ``deaths``: it may end."""
        if not self._processes:
            self._start()
        for process in self._processes:
            process.stdin.write(json.dumps([function, arguments]) + "\n")
            process.stdin.flush()
        return self._await(timeout, function, deaths)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            process.stdin.close()
            process.stdout.close()
        for log in self._logs:
            log.close()
        self._processes, self._logs = [], []

    def _start(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        shared["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        for rank in range(RANKS):
            log = tempfile.TemporaryFile("w+")
            self._logs.append(log)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, __file__],
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            )
        self._await(START_SECONDS, "start")

    def _await(self, timeout: float, what: str, deaths: bool = False) -> list[dict]:
        deadline = time.monotonic() + timeout
        replies = []
        for rank, process in enumerate(self._processes):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            line = process.stdout.readline() if ready else ""
            if ready and not line and deaths:
                replies.append({"error": "died"})
                continue
            if not line:
                end = self._ends_of_logs()
                self.stop()
                how = "died" if ready else f"gave no answer within {timeout} s"
                raise AssertionError(f"{what}: rank {rank} {how}\n{end}")
            replies.append(json.loads(line))
        return replies

    def _ends_of_logs(self) -> str:
        ends = []
        for log in self._logs:
            log.seek(0)
            ends.append(log.read()[-3000:])
        return "\n----\n".join(ends)


def serve() -> None:
    """One rank: read calls from stdin, answer on stdout. Whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # those of other packages
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, timeout=timedelta(seconds=COLLECTIVE_SECONDS))

    def answer(reply: dict) -> None:
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    answer({"result": None})
    for line in sys.stdin:
        function, arguments = json.loads(line)
        module, _, name = function.partition(":")
        begun = time.monotonic()
        try:
            reply = {"result": getattr(importlib.import_module(module), name)(**arguments)}
        except BaseException:
            reply = {"error": traceback.format_exc()}
        answer({**reply, "seconds": time.monotonic() - begun})
    os._exit(0)  # not through destructors, which may wait for the other rank


if __name__ == "__main__":
    serve()
