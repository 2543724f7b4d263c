"""Eight virtual CPU devices, for the tests that lay tensors over a mesh. JAX reads this when it is first imported."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
