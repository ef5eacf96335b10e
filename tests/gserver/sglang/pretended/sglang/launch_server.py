"""A server with two processes that answers what a gserver asks, says what it was told, and dies on demand."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import sgl_kernel

from sglang.scheduler import schedule
from sglang.srt.entrypoints.http_server import app
from sglang.srt.utils.common import init_custom_process_group

METRICS = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine="a"} 2.0
sglang:num_running_reqs{engine="b"} 1.0
# TYPE sglang:generation_tokens counter
sglang:generation_tokens_total{engine="a"} 40.0
"""


stalled = threading.Event()
"""Nothing is answered any more."""
scheduler_stalled = threading.Event()
"""What the scheduler has to answer is not."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            sys.stderr.write("the last words\n")
            sys.stderr.flush()
            os._exit(7)
        if self.path == "/stall" or stalled.is_set():
            stalled.set()
            time.sleep(600)
        if self.path == "/stall-scheduler":
            scheduler_stalled.set()
        if self.path == "/server_info" and scheduler_stalled.is_set():
            time.sleep(600)
        told = {
            "argv": sys.argv[1:],
            "pids": [os.getpid(), worker.pid],
            "kernels": sgl_kernel.__version__,
            "group": str(init_custom_process_group()),
            "paths": [getattr(route, "path", "") for route in app.router.routes],
            "environment": dict(os.environ),
            "starts_by": multiprocessing.get_start_method(),
            "worker": worker_tells,
        }
        content = METRICS if self.path == "/metrics" else json.dumps(told)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--hang", action="store_true")
    options, _ = parser.parse_known_args()
    if options.fail:
        raise SystemExit("this machine is not good enough")
    if options.hang:
        print("loading", flush=True)  # noqa: T201
        time.sleep(600)
    multiprocessing.set_start_method("spawn", force=True)
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.Process(target=schedule, args=(there,))
    worker.start()
    worker_tells = here.recv()
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
