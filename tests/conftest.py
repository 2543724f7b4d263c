"""What must hold before any test is imported."""

import os
import signal

# Eight virtual CPU devices, for the tests that lay tensors over a mesh. JAX reads this when it is first imported.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# Started in the background of a script, a process ignores Ctrl-C, and so would every command that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
