"""``python child.py PARENT_PID PROGRAM ARGUMENTS...`` becomes PROGRAM, which dies with its parent.

A process of its own instead of ``preexec_fn``: between fork and exec of a process with threads Python is not safe.
The kernel keeps the parent-death signal over exec.
"""

from __future__ import annotations

import os
import sys

from pdcluster_cli.processes.linux import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
