"""What every test shares: OpenBLAS in front of MLX, and a hypothesis that looks at no clock."""

import os
import signal
from contextlib import suppress

from hypothesis import HealthCheck, settings

# Products of tiny models are too small for threads, which on a busy machine wait for each other most of the time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A test says itself which kernels it wants: what this machine has measured must not change what others see.
os.environ.setdefault("DFLASH_KERNELS", "off")
# The same of costs: without them whole blocks are verified, on a slow machine as on a fast one.
os.environ.setdefault("DFLASH_COSTS", "off")
# A shell starts what runs in its background deaf to Ctrl-C, and so would be the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

import dflash_mlx  # noqa: E402, F401  before a test imports mlx, which binds its BLAS when it is loaded

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
