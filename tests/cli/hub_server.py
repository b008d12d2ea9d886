#!/usr/bin/env python3
"""A small Hugging Face compatible hub on the loopback, well-behaved or not.

    hub_server.py MODE LOG [FOLDER]

Prints its port and serves one repository, org/tiny, until it is ended: that of FOLDER, or
one of its own. Every request
is a line in LOG: method, path, Range, If-Range, Authorization. MODE says how it
misbehaves (see below); "ok" does not.
"""
import hashlib
import http.server
import json
import pathlib
import random
import sys
import threading
import time
import urllib.parse

BIG = random.Random(7).randbytes(300_000)
FILES = {
    "config.json": b'{"model_type": "llama"}\n',
    "tokenizer.json": b'{"version": "1.0"}\n',
    "model.safetensors": BIG,
    "pytorch_model.bin": b"never wanted",
    "README.md": b"# tiny\n",
    "original/consolidated.safetensors": b"never wanted either",
}
GGUFS = {"tiny.Q4_0.gguf": BIG, "tiny.Q8_0.gguf": BIG[:1000]}
EVIL = {
    "evil-gguf": ["x/../../../../evil-Q4_K_M.gguf"],
    "evil-part": ["a/..\\evil-Q4_K_M-00001-of-00002.gguf"],
    "evil-control": ["evil\x1b[2J-Q4_K_M.gguf"],
    "evil-long": ["x" * 300 + "-Q4_K_M.gguf"],
    "odd-names": [".gguf", "-00001-of-00002.gguf", "Q4_K_M.gguf.part", "mmproj-Q4_K_M.gguf",
                  "tiny.imatrix-Q4_K_M.gguf", "x-00003-of-00002.gguf", "x-00000-of-00001.gguf"],
}
LARGE = (".safetensors", ".bin", ".gguf", ".zip", ".tar", ".whl")
DROP_AFTER = 100_000

mode, log_path = sys.argv[1:3]
files = GGUFS if mode == "ggufs" else FILES
if len(sys.argv) > 3:
    root = pathlib.Path(sys.argv[3])

    class Folder(dict):
        """Files as they are when they are asked for."""

        def __getitem__(self, name):
            return super().__getitem__(name).read_bytes()

        def items(self):
            return [(name, self[name]) for name in self]

    files = Folder({str(f.relative_to(root)): f
                    for f in sorted(root.rglob("*")) if f.is_file()})
seen = {}  # path -> number of requests


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def git_blob(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def listing(blobs):
    siblings = []
    for name, data in files.items():
        entry = {"rfilename": name}
        if blobs:
            entry["size"] = len(data) + (mode == "size-lie") * 5
            entry["blobId"] = git_blob(data)
            if name.endswith(LARGE):
                digest = "0" * 64 if mode == "wrong-hash" else sha256(data)
                entry["lfs"] = {"sha256": digest, "size": entry["size"]}
        siblings.append(entry)
    if mode == "evil-name":
        siblings.append({"rfilename": "sub/../../../evil.safetensors"})
    if mode == "absolute-name":
        siblings.append({"rfilename": "/etc/evil.safetensors"})
    for name in EVIL.get(mode, ()):
        siblings.append({"rfilename": name})
    if mode == "missing-part":
        siblings = [s for s in siblings if "-00002-of-" not in s["rfilename"]]
    if mode == "many-names":
        siblings += [{"rfilename": f"x{i}-IQ2_{i}.gguf"} for i in range(20000)]
    return json.dumps({"id": "org/tiny", "siblings": siblings}).encode()


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def note(self):
        with open(log_path, "a", encoding="utf-8") as log:
            print(self.command, self.path, "range=" + self.headers.get("Range", ""),
                  "if-range=" + self.headers.get("If-Range", ""),
                  "auth=" + self.headers.get("Authorization", ""),
                  "host=" + self.headers.get("Host", ""), file=log)

    def answer(self, status, body=b"", kind="text/plain", **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.note()
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        seen[path] = seen.get(path, 0) + 1
        if mode in ("401", "404", "500"):
            self.answer(int(mode), b"no")
        elif mode == "flaky" and seen[path] == 1:
            self.answer(503, b"busy")
        elif path.startswith("/api/models/org/tiny"):
            self.api(path, url.query)
        elif path.startswith("/org/tiny/resolve/main/"):
            self.resolve(path[len("/org/tiny/resolve/main/"):])
        elif path.startswith("/cdn/"):
            self.send_file(path[len("/cdn/"):])
        else:
            self.answer(404, b"not found")

    def api(self, path, query):
        if mode == "mirror" and (path != "/api/models/org/tiny" or query):
            self.answer(404, b"not found")
        elif mode == "not-json":
            self.answer(200, b"<html>hello</html>", "text/html")
        else:
            self.answer(200, listing("blobs=true" in query), "application/json")

    def resolve(self, name):
        if name not in files:
            self.answer(404, b"not found")
        elif name.endswith(LARGE) and mode in ("redirect", "redirect-port"):
            host = "localhost" if mode == "redirect" else "127.0.0.1"
            port = (server if mode == "redirect" else other).server_address[1]
            self.answer(302, Location=f"http://{host}:{port}/cdn/{name}",
                        X_Linked_Etag=f'"{sha256(files[name])}"',
                        X_Linked_Size=str(len(files[name])))
        elif mode == "html" and name.endswith(LARGE):
            self.answer(200, b"<html>please log in</html>", "text/html; charset=utf-8")
        else:
            self.send_file(name)

    def send_file(self, name):
        data = files[name]
        large = name.endswith(LARGE)
        tag = f'"{sha256(data) if large else git_blob(data)}"'
        if mode == "odd-tag":
            tag = '"' + "0" * 64 + '"'
        if mode == "changed" and large and seen.get("/org/tiny/resolve/main/" + name) == 1:
            data, tag = bytes(len(data)), '"an older version"'
        first, last = 0, len(data) - 1
        wanted = self.headers.get("Range")
        if wanted and mode != "no-ranges" and self.headers.get("If-Range", tag) == tag:
            first, _, end = wanted[len("bytes="):].partition("-")
            first = int(first)
            if end:
                last = min(last, int(end))
            if first >= len(data):
                self.answer(416, Content_Range=f"bytes */{len(data)}")
                return
        body = data[first:last + 1]
        part = first > 0 or last < len(data) - 1
        length = len(body)
        if mode == "too-long" and large:
            body, length = body + b"x" * 1000, length + 1000
        self.send_response(206 if part else 200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", tag)
        if part:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        cut = {"drop": True, "drop-dead": True, "changed": True, "stall": True,
               "no-ranges": seen.get("/org/tiny/resolve/main/" + name, 0) == 1}
        if large and cut.get(mode) and length > DROP_AFTER:
            self.wfile.write(body[:DROP_AFTER])
            self.wfile.flush()
            if mode == "stall" and seen["/org/tiny/resolve/main/" + name] == 1:
                time.sleep(3)
            self.close_connection = True
        elif large and mode == "drop-dead":
            self.close_connection = True
        else:
            self.wfile.write(body)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass  # clients that leave are part of the tests


server = Server(("127.0.0.1", 0), Hub)
other = Server(("127.0.0.1", 0), Hub)  # the same on another port
threading.Thread(target=other.serve_forever, daemon=True).start()
print(server.server_address[1], flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown()),
                 daemon=True).start()
server.serve_forever()
