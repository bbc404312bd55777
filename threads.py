"""threads.py: how threads wait for each other. Imported before torch by the programs that train.

A thread of GNU's OpenMP that waits for another one spins, then sleeps. By default it spins for some
milliseconds, also where other work has the core: two runs on the same two cores then take up to
4.7 s a step (clm, not compiled; 0.1 s alone). With this many turns they take 0.3 s (NOTES.md,
section 4). A value that the user has set stays.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")
