"""threads.py: how threads wait for each other. Imported before torch by the programs that train.

A GNU OpenMP thread that waits for another one spins, then sleeps. By default it spins for some
milliseconds, even if other work needs the core: two runs on the same two cores then take up to
4.7 s a step (clm, not compiled; 0.1 s alone). With the spin count below, they take 0.3 s (NOTES.md,
section 4). A value that the user has set is kept.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")
