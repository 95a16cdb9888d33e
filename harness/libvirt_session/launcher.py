"""Starts a libvirt daemon as the main process of a pod, and ends it with everything that it started.

A program of its own, started as root. QEMU puts itself in the background; as the nearest sub-reaper this
process inherits it, and takes everything in its control group along when it ends.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from harness.libvirt_session.pod import Pod, process_control

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(pod_json: str, plan_json: str) -> int:
    """Enters the pod, starts the daemon and stays until it ends."""
    pod, plan = Pod.from_json(pod_json), json.loads(plan_json)
    pod.enter()
    process_control(PR_SET_CHILD_SUBREAPER, 1)
    # Asked for after the change of user, which forgets it.
    process_control(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != plan["parent"]:
        return 1
    return _supervise(plan["command"], plan["environment"], Path(pod.group) / "cgroup.procs")


def _supervise(command: list[str], environment: dict[str, str], group: Path) -> int:
    daemon = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def stop(_number: int, _frame: object) -> None:
        daemon.send_signal(signal.SIGTERM)
        signal.alarm(20)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, lambda *_: daemon.send_signal(signal.SIGKILL))
    status = 0
    while True:
        pid, status = os.wait()
        if pid == daemon.pid:
            daemon.returncode = os.waitstatus_to_exitcode(status)
            break
    signal.alarm(0)
    while left := {int(line) for line in group.read_text().split()} - {os.getpid()}:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.wait()
        except ChildProcessError:
            break
    return daemon.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
