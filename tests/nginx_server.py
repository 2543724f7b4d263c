"""A web server that others wrote: nginx on loopback, with a place that is slow and one that serves no ranges."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
NO_NGINX = "nginx is not installed (Debian has it in the package nginx-light)"

_HOST = "127.0.0.1"
_START_SECONDS = 10.0
_CONFIG = """\
{user} daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off; default_type application/octet-stream; keepalive_timeout 1s;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{
    listen {host}:{port}; root {folder}/www;
    location /slow/ {{ alias {folder}/www/; limit_rate 200k; }}
    location /whole/ {{ alias {folder}/www/; max_ranges 0; }}
  }}
}}
"""


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Lend the URL of a server that serves `www` in a folder: as `/`, as `/slow/` at 200 KiB/s, as `/whole/` whole."""
    assert NGINX is not None, NO_NGINX
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    (folder / "www").mkdir(exist_ok=True)
    user = "" if os.geteuid() else "user root;"  # its workers would else be nobody's, who may not look in here
    (folder / "nginx.conf").write_text(_CONFIG.format(folder=folder, host=_HOST, port=port, user=user))
    command: list[str | Path] = [NGINX, "-p", folder, "-e", folder / "error.log", "-c", folder / "nginx.conf"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _listens(port):
                assert time.monotonic() < deadline, (folder / "error.log").read_text()
                time.sleep(0.02)
            yield f"http://{_HOST}:{port}"
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    try:
        socket.create_connection((_HOST, port), timeout=1).close()
    except OSError:
        return False
    return True
