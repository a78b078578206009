# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Two processes that run functions of test files side by side; run as a script, this file is one of them.

The processes stay for many calls, since starting them takes longer than what they do. Those without CUDA are forks of
a third, run as ``ranks.py DESCRIPTOR``, which has imported what takes them ten seconds each; CUDA survives no fork.
"""

import atexit
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch

RANKS = 2
START_SECONDS = 300
CALL_SECONDS = 300
GRACE_SECONDS = 20  # for the answers of the others, once a rank has raised
COLLECTIVE_SECONDS = 60  # a rank that waits for longer than this raises
PATIENCE = 40  # seconds: of peers while they generate, on a host where one of them may get no core for a while
# Multicast over NVLink is a state of the switch, which other programs of the host share.
NCCL_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class Ranks:
    """The processes, started at the first call and after one that failed.

    Args:
        backend: 'gloo' or 'nccl'.
    """

    def __init__(self, backend: str = "gloo") -> None:
        self.backend = backend
        self._processes: list[subprocess.Popen | Fork] = []
        self._logs: list = []

    def run(self, function: str, timeout: float = CALL_SECONDS, **arguments) -> list:
        """What ``module:name`` returns on each rank, as JSON has it. Asserts that no rank raises or takes longer."""
        replies = self.replies(function, timeout, **arguments)
        failures = [f"rank {rank}: {reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
        if failures:
            self.stop()
            raise AssertionError("\n\n".join(failures))
        return [reply["result"] for reply in replies]

    def replies(self, function: str, timeout: float = CALL_SECONDS, deaths: bool = False, **arguments) -> list[dict]:
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
        shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(RANKS), "TORCHELASTIC_RESTART_COUNT": "0"}
        shared.update(NCCL_ENVIRONMENT, DISTRIBUTED_BACKEND=self.backend, TORCHELASTIC_USE_AGENT_STORE="True")
        start = new_process if torch.cuda.is_available() else Fork
        for rank in range(RANKS):
            log = tempfile.TemporaryFile("w+")
            self._logs.append(log)
            self._processes.append(start({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log))
        (first,) = self._await(START_SECONDS, "start", ranks=[0])
        for process in self._processes:
            process.stdin.write(f"{first['result']}\n")
            process.stdin.flush()
        self._await(START_SECONDS, "start")

    def _await(self, timeout: float, what: str, deaths: bool = False, ranks=range(RANKS)) -> list[dict]:
        deadline = time.monotonic() + timeout
        replies: dict[int, dict] = {}
        waiting = {self._processes[rank].stdout: rank for rank in ranks}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(f"{what}: rank {min(waiting.values())} gave no answer within {timeout} s", replies)
            for stdout in ready:
                rank, line = waiting.pop(stdout), stdout.readline()
                if not line and not deaths:
                    self._give_up(f"{what}: rank {rank} died", replies)
                replies[rank] = json.loads(line) if line else {"error": "died"}
                if "error" in replies[rank] and not deaths:  # the others may be waiting for this one
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [replies[rank] for rank in sorted(replies)]

    def _give_up(self, why: str, replies: dict[int, dict]) -> None:
        errors = [f"rank {rank}: {reply['error']}" for rank, reply in replies.items() if "error" in reply]
        ends = self._ends_of_logs()
        self.stop()
        raise AssertionError("\n\n".join([why, *errors, ends]))

    def _ends_of_logs(self) -> str:
        ends = []
        for log in self._logs:
            log.seek(0)
            ends.append(log.read()[-3000:])
        return "\n----\n".join(ends)


def child_environment() -> dict[str, str]:
    folders = [str(Path(__file__).parent), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}


def new_process(environment: dict[str, str], log) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__],
        env={**child_environment(), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )


class Fork:
    """As much of ``subprocess.Popen`` as a rank needs, of a fork of the process that has its imports."""

    def __init__(self, environment: dict[str, str], log) -> None:
        (own_stdin, stdin), (stdout, own_stdout) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        forks = server_of_forks()
        socket.send_fds(forks, [json.dumps(environment).encode()], [own_stdin, own_stdout, log.fileno()])
        os.close(own_stdin)
        os.close(own_stdout)
        pid = forks.recv(64)
        if not pid:
            raise RuntimeError("the process that ranks are forks of has ended")
        self.pid = int(pid)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while self.stdout.read(4096):  # until nobody has the other end
            pass


@functools.cache
def server_of_forks() -> socket.socket:
    """Started at the first call; it ends with the other end of its socket, when this process does."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = theirs.fileno()
    command = [sys.executable, __file__, str(descriptor)]
    server = subprocess.Popen(command, env=child_environment(), stdin=subprocess.DEVNULL, pass_fds=[descriptor])
    theirs.close()

    def end() -> None:
        own.close()
        server.wait()

    atexit.register(end)
    return own


def serve_forks(descriptor: int) -> None:
    """For every message, an environment and three descriptors, one more rank; its process id is the answer."""
    warnings.simplefilter("ignore")  # those of other packages
    import tensor_parallel_cases  # noqa: F401  what ranks import

    requests = socket.socket(fileno=descriptor)
    while True:
        message, streams, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            requests.close()
            for standard, stream in enumerate(streams):
                os.dup2(stream, standard)
                os.close(stream)
            os.environ.update(json.loads(message))
            serve()
        for stream in streams:
            os.close(stream)
        requests.send(str(pid).encode())


def serve() -> None:
    """One rank: read calls from stdin, answer on stdout. Whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # those of other packages
    import deepspeed

    from deepspeed_hybrid.generation import peers

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    peers.PATIENCE = PATIENCE

    def answer(reply: dict) -> None:
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    store = None
    if os.environ["RANK"] == "0":  # it keeps the messages, at whichever port is free when it is taken
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        answer({"result": store.port})
    os.environ["MASTER_PORT"] = sys.stdin.readline().strip()
    deepspeed.init_distributed(
        os.environ["DISTRIBUTED_BACKEND"], auto_mpi_discovery=False, timeout=timedelta(seconds=COLLECTIVE_SECONDS)
    )
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
    serve_forks(int(sys.argv[1])) if len(sys.argv) > 1 else serve()
