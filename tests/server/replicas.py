#!/usr/bin/env python3
"""Two replicas of still serve behind nginx, with deploy/nginx.conf as it is but for ports.

A conversation stays with its replica, both replicas get some, and when one of them is killed
under load every request is answered, at the latest when it is sent again.

    replicas.py STILL MAKE_MODEL NGINX_CONF
"""
import collections
import http.client
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

CONVERSATIONS, TURNS = 8, 3
CLIENTS, REQUESTS = 4, 25
PATIENCE = 120.0  # seconds, for a machine that is busy with other things


def wait_for(what, condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"FAILED: not within {PATIENCE:.0f} s: {what}")
        time.sleep(0.05)


def answers(port, path="/health"):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False


class Replica:
    def __init__(self, still, model, scratch, port=0):
        command = [still, "serve", model, "--port", str(port), "--json", "--threads", "1",
                   "--chat-template", "chatml"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=scratch)
        self.port = json.loads(self.process.stdout.readline())["port"]

    def kill(self):
        self.process.kill()
        self.process.wait()


class Proxy:
    """nginx in a folder of its own, without privileges. Its log has a line for each request:
    the replicas that it was sent to, and the status."""

    def __init__(self, config, ports, scratch):
        self.log = scratch / "access.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        text = pathlib.Path(config).read_text(encoding="utf-8")
        for old, new in (("127.0.0.1:8081", f"127.0.0.1:{ports[0]}"),
                         ("127.0.0.1:8082", f"127.0.0.1:{ports[1]}"),
                         ("listen 8080", f"listen 127.0.0.1:{self.port}")):
            assert text.count(old) == 1, f"{config}: '{old}' is not there once"
            text = text.replace(old, new)
        (scratch / "still.conf").write_text(text, encoding="utf-8")
        temporary = "".join(f"{kind}_temp_path {scratch}/{kind};\n"
                            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        (scratch / "nginx.conf").write_text(
            f"daemon off; pid {scratch}/nginx.pid; error_log {scratch}/error.log;\n"
            "events { worker_connections 256; }\n"
            "http { log_format sent '$upstream_addr $status';\n"
            f"access_log {self.log} sent;\n{temporary}include {scratch}/still.conf; }}\n",
            encoding="utf-8")
        self.process = subprocess.Popen(
            ["nginx", "-c", str(scratch / "nginx.conf"), "-e", str(scratch / "error.log")])
        wait_for("nginx passes requests on", lambda: answers(self.port))

    def ask(self, text):
        """The generated text; an exception if there is no whole answer."""
        return self.post("/v1/completions", prompt=text, temperature=0)["choices"][0]["text"]

    def post(self, path, **fields):
        body = json.dumps({"model": "tiny", "max_tokens": 4, **fields})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            # As the page asks, which browsers say came from the proxy.
            connection.request("POST", path, body, {"Origin": f"http://127.0.0.1:{self.port}"})
            reply = connection.getresponse()
            content = reply.read()
            if reply.status != 200:
                raise OSError(f"status {reply.status}: {content[:200]!r}")
            return json.loads(content)
        finally:
            connection.close()

    def replicas_of_last(self, n):
        lines = self.log.read_text(encoding="utf-8").splitlines()[-n:]
        return [re.findall(r"127\.0\.0\.1:(\d+)", line) for line in lines]


def stays_with_its_replica(proxy):
    used = collections.Counter()
    for i in range(CONVERSATIONS):
        text = f"{i} is the number of this conversation, and it begins like no other. " * 5
        for _ in range(TURNS):
            text += proxy.ask(text)
        wait_for("the log has all turns",
                 lambda n=(i + 1) * TURNS + 1: len(proxy.log.read_text("utf-8").splitlines()) >= n)
        seen = {r for replicas in proxy.replicas_of_last(TURNS) for r in replicas}
        assert len(seen) == 1, f"conversation {i} moved: {seen}"
        used.update(seen)
    assert len(used) == 2, f"one replica has all conversations: {used}"


def keys_tell_apart(proxy):
    """The same beginning, and conversations that the client tells apart or together."""
    system = {"role": "system", "content": "You know a lot of things. " * 20}

    def replica_of(text, key):
        lines = len(proxy.log.read_text("utf-8").splitlines())
        proxy.post("/v1/chat/completions", prompt_cache_key=key,
                   messages=[system, {"role": "user", "content": text}])
        wait_for("the log", lambda: len(proxy.log.read_text("utf-8").splitlines()) > lines)
        return tuple(proxy.replicas_of_last(1)[0])

    one = {key: {replica_of(text, key) for text in ("a", "b")} for key in map(str, range(8))}
    assert all(len(replicas) == 1 for replicas in one.values()), one
    assert len(set.union(*one.values())) == 2, one


def survives_a_killed_replica(proxy, replica):
    first_tries, failed, done = [], [], threading.Semaphore(0)

    def client(c):
        for i in range(REQUESTS):
            text = f"{c}.{i} asks for a few words. "
            for attempt in (1, 2):
                try:
                    proxy.ask(text)
                    break
                except (OSError, http.client.HTTPException, ValueError) as e:
                    (first_tries if attempt == 1 else failed).append(f"{text}: {e!r}")
            done.release()

    threads = [threading.Thread(target=client, args=(c,)) for c in range(CLIENTS)]
    for t in threads:
        t.start()
    for _ in range(CLIENTS * REQUESTS // 3):
        done.acquire()
    replica.kill()
    for t in threads:
        t.join()
    assert not failed, f"failed also when sent again: {failed}"
    print(f"{CLIENTS * REQUESTS} requests, {len(first_tries)} sent again")


def main():
    still, make_model, config = sys.argv[1:4]
    if not shutil.which("nginx"):
        print("skipped: nginx is not installed")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        model = str(scratch / "tiny.gguf")
        subprocess.run([make_model, "tiny", model], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
        running = []
        try:
            replicas = [Replica(still, model, folder) for _ in range(2)]
            running += [r.process for r in replicas]
            proxy = Proxy(config, [r.port for r in replicas], scratch)
            running.append(proxy.process)
            stays_with_its_replica(proxy)
            keys_tell_apart(proxy)
            survives_a_killed_replica(proxy, replicas[0])
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    print("all checks passed")


if __name__ == "__main__":
    main()
