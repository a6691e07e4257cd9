"""A script that makes children of several kinds and prints all their pids as JSON."""

FAMILY = """\
import json, os, signal, sys
kinds = sys.argv[1:]
if "ignore" in kinds:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
read, write = os.pipe()

def child(*, session=False, twice=False):
    if os.fork():
        return
    if session:
        os.setsid()
    if twice and os.fork():
        os._exit(0)
    os.write(write, str(os.getpid()).encode().rjust(10))
    while True:
        signal.pause()

count = 0
for kind in kinds:
    if kind in ("child", "session", "daemon"):
        child(session=kind != "child", twice=kind == "daemon")
        count += 1
pids = [os.getpid(), *(int(os.read(read, 10)) for _ in range(count))]
print(json.dumps(pids), flush=True)
if "exit" in kinds:
    os._exit(3)
while True:
    signal.pause()
"""
