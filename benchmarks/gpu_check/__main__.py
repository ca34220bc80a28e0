"""`python -m gpu_check`: see `gpu_check/run.py`.

Nothing else stands here: a process that is started anew cannot import what is defined in the `__main__` of a package.
"""

import sys

from gpu_check.run import main

if __name__ == "__main__":
    sys.exit(main())
