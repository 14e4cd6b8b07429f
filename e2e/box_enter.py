"""``python box_enter.py PARENT_PID NAME PROGRAM ARGUMENTS...`` becomes PROGRAM, in cgroups of its own.

It dies with its parent. A file of its own, because between fork and exec Python is not safe.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.groups import enter_new_groups
from pdcluster_cli.processes.linux import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    enter_new_groups(sys.argv[2])
    os.execvp(sys.argv[3], sys.argv[3:])
