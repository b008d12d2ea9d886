"""serve_client.py PORT WHAT [ARGUMENT...]: asks a server and checks what it says."""
import concurrent.futures
import http.client
import json
import math
import os
import signal
import socket
import sys
import time

PORT = int(sys.argv[1])


def ask(method, path, body=None, headers=None, raw=False):
    """Status and body of an answer; the body is JSON whatever happens."""
    c = http.client.HTTPConnection("127.0.0.1", PORT, timeout=100)
    if body is not None and not raw:
        body = json.dumps(body)
    c.request(method, path, body, headers or {})
    r = c.getresponse()
    text = r.read()
    assert r.getheader("Content-Type") == "application/json", r.getheaders()
    c.close()
    return r.status, json.loads(text)


def complete(**body):
    status, x = ask("POST", "/v1/completions", {"temperature": 0, **body})
    assert status == 200, (status, x)
    return x


def score(prompts, top=1):
    """The lists of every prompt, as the harness asks for them."""
    x = complete(prompt=prompts, max_tokens=1, logprobs=top, echo=True)
    return [c["logprobs"] for c in sorted(x["choices"], key=lambda c: c["index"])]


def refused(status, code, got, words=""):
    error = got[1]["error"]
    assert got[0] == status and error["code"] == code, got
    assert words in error["message"] and error["type"], got


def endpoints():
    assert ask("GET", "/health") == (200, {"status": "ok"})
    status, x = ask("GET", "/v1/models")
    assert status == 200 and x["data"][0]["id"] == "tiny.gguf", x
    status, info = ask("GET", "/tokenizer_info")
    assert status == 200 and info["eos_token"] and info["vocab_size"] == 512, info
    text = "hello caf\u00e9 \u4e16\u754c " + info["eos_token"]
    status, x = ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert status == 200 and x["count"] == len(x["tokens"]) > 5, x
    status, back = ask("POST", "/detokenize", {"tokens": x["tokens"]})
    assert status == 200 and back["prompt"] == text, back
    status, one = ask("POST", "/tokenize", {"prompt": info["eos_token"]})
    assert len(one["tokens"]) == 1, one
    assert ask("POST", "/detokenize", {"tokens": []})[1] == {"prompt": ""}
    refused(404, "not_found", ask("GET", "/v1/frob"))
    refused(405, "method_not_allowed", ask("GET", "/v1/completions"))
    refused(405, "method_not_allowed", ask("POST", "/health", {}))
    refused(400, "invalid_value", ask("POST", "/tokenize", {}))
    refused(400, "invalid_value", ask("POST", "/detokenize", {"tokens": [512]}))
    refused(400, "invalid_value", ask("POST", "/detokenize", {"tokens": [1.5]}))


def check_lists(ids, lists, top):
    """n+1 entries, the first without a past; the argmax flag as the harness takes it."""
    n = len(ids) + 1
    assert all(len(lists[k]) == n for k in lists), {k: len(lists[k]) for k in lists}
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    for token, value, others in zip(lists["tokens"][1:], lists["token_logprobs"][1:],
                                    lists["top_logprobs"][1:]):
        assert others[token] == value and max(top, 1) <= len(others) <= top + 1
        assert max(others.values()) >= value
    # What was generated greedily is the most likely.
    assert lists["token_logprobs"][-1] == max(lists["top_logprobs"][-1].values())


def scores(ids_file, logprobs_file):
    ids = json.load(open(ids_file))
    want = json.load(open(logprobs_file))["logprobs"]
    for prompt in (ids, [ids]):
        lists = score(prompt)[0]
        check_lists(ids, lists, 1)
        got = lists["token_logprobs"][1:-1]
        assert len(got) == len(want)
        assert all(math.isclose(a, b, rel_tol=1e-7) for a, b in zip(got, want)), (got, want)
    wide = score(ids, 20)[0]
    check_lists(ids, wide, 20)
    assert wide["token_logprobs"] == lists["token_logprobs"]
    for one, many in zip(lists["top_logprobs"][1:], wide["top_logprobs"][1:]):
        assert max(one.values()) == max(many.values())
    none = score(ids, 0)[0]
    assert none["top_logprobs"][1] == {none["tokens"][1]: none["token_logprobs"][1]}
    # A prompt whose tokens are all the most likely ones: the flag says so.
    x = complete(prompt=[5, 9], max_tokens=6, logprobs=1)["choices"][0]["logprobs"]
    assert all(v == max(t.values()) for v, t in zip(x["token_logprobs"], x["top_logprobs"]))
    x = complete(prompt=ids, max_tokens=0, logprobs=1, echo=True)["choices"][0]
    assert len(x["logprobs"]["tokens"]) == len(ids) and x["finish_reason"] == "length"


def shared():
    """Prompts that begin alike: alone, together, in any order, the numbers are the same."""
    start = [(i * 37) % 500 + 3 for i in range(40)]
    prompts = [start + [a, b, c] for a in (7, 8) for b in (20, 30) for c in (1, 2)]
    prompts += [start[:25], start, start + [7], [99, 98, 97], prompts[0]]
    together = score(prompts)
    for i, prompt in reversed(list(enumerate(prompts))):
        score([[400 + i, 3, 4]])  # in between, something else
        assert score([prompt])[0] == together[i], i
    assert score(prompts[::-1])[::-1] == together
    # Without scores the session is fed another way; afterwards scores are right again.
    text = [complete(prompt=p, max_tokens=5)["choices"][0]["text"] for p in prompts]
    batch = complete(prompt=prompts, max_tokens=5)["choices"]
    assert [c["text"] for c in batch] == text
    assert score(prompts) == together


def generate():
    x = complete(prompt="hello", max_tokens=8)
    c = x["choices"][0]
    assert x["object"] == "text_completion" and c["logprobs"] is None
    assert x["usage"]["completion_tokens"] <= 8
    assert x["usage"]["total_tokens"] == sum(
        x["usage"][k] for k in ("prompt_tokens", "completion_tokens"))
    echoed = complete(prompt="hello", max_tokens=8, echo=True)["choices"][0]["text"]
    assert echoed == "hello" + c["text"]
    two = complete(prompt=["hello", "other words"], max_tokens=8)["choices"]
    assert two[0]["text"] == c["text"] and two[1]["index"] == 1
    assert complete(prompt="hello")["usage"]["completion_tokens"] <= 16
    cut = c["text"][3:5]
    stopped = complete(prompt="hello", max_tokens=8, stop=["@never@", cut])["choices"][0]
    assert stopped["text"] == c["text"][:c["text"].index(cut)], (stopped, c)
    assert stopped["finish_reason"] == "stop"
    hot = [complete(prompt="hello", max_tokens=20, temperature=2, top_p=0.9, seed=s)
           ["choices"][0]["text"] for s in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2], hot
    x = complete(prompt="h\u00e9\u4e16", max_tokens=2, logprobs=1, echo=True)["choices"][0]
    lists = x["logprobs"]
    assert lists["text_offset"][0] == 0 and lists["text_offset"] == sorted(lists["text_offset"])
    assert max(lists["text_offset"]) <= len(x["text"])


def limit():
    refused(400, "context_length_exceeded",
            ask("POST", "/v1/completions", {"prompt": list(range(17))}), "holds 16")
    check_lists(list(range(16)), score(list(range(16)))[0], 1)
    x = complete(prompt=list(range(10)), max_tokens=1000)
    assert x["usage"]["completion_tokens"] <= 7, x["usage"]


def key(right):
    for headers in ({}, {"Authorization": right}, {"Authorization": "Bearer "},
                    {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {right}x"},
                    {"Authorization": f"Bearer {right[:-1]}"}):
        refused(401, "invalid_api_key", ask("GET", "/v1/models", headers=headers))
        refused(401, "invalid_api_key",
                ask("POST", "/v1/completions", {"prompt": [1]}, headers))
    good = {"Authorization": f"Bearer {right}"}
    assert ask("GET", "/v1/models", headers=good)[0] == 200
    assert ask("POST", "/v1/completions", {"prompt": [1]}, good)[0] == 200
    assert ask("GET", "/health")[0] == 200


def raw_socket(data, wait=True):
    s = socket.create_connection(("127.0.0.1", PORT), timeout=30)
    s.sendall(data)
    if wait:
        s.recv(65536)
    s.close()


def hostile():
    def post(body, **fields):
        if not isinstance(body, (bytes, str)):
            body = json.dumps({**body, **fields})
        return ask("POST", "/v1/completions", body, raw=True)

    for body in ("", "{", "[1]", "nul", '{"prompt": "x" ', b'{"prompt": "\xff\xfe"}',
                 b"\x00" * 100, '{"prompt": [1' + "0" * 400 + "]}",
                 '{"max_tokens": 123456789012345678901234567890, "prompt": "x"}',
                 "[" * 100000, '{"prompt":' * 50000, '{"temperature": 1e999, "prompt": ""}',
                 '{"prompt": "\\ud800"}'):
        refused(400, "invalid_json", post(body))
    bad = [{}, {"prompt": None}, {"prompt": 1}, {"prompt": {}}, {"prompt": []},
           {"prompt": [[]]}, {"prompt": [1, "a"]}, {"prompt": ["a", 1]},
           {"prompt": [1.5]}, {"prompt": [-1]}, {"prompt": [512]}, {"prompt": [[1], [512]]},
           {"prompt": [1], "max_tokens": -1}, {"prompt": [1], "max_tokens": 2 ** 40},
           {"prompt": [1], "max_tokens": "4"}, {"prompt": [1], "temperature": -1},
           {"prompt": [1], "temperature": "hot"}, {"prompt": [1], "top_p": 2},
           {"prompt": [1], "logprobs": 21}, {"prompt": [1], "logprobs": True},
           {"prompt": [1], "echo": 1}, {"prompt": [1], "n": 2}, {"prompt": [1], "seed": 1.5},
           {"prompt": [1], "stop": [""]}, {"prompt": [1], "stop": [1]},
           {"prompt": [1], "stop": ["x"] * 17}]
    for body in bad:
        refused(400, "invalid_value", post(body))
    for field in ({"stream": True}, {"suffix": "x"}, {"logit_bias": {"1": 2}}):
        refused(400, "unsupported", post({"prompt": [1]}, **field))
    refused(400, "context_length_exceeded", post({"prompt": "1 " * 5000}), "holds 2048")
    assert post({"prompt": [1], "max_tokens": None, "stop": None, "user": "u",
                 "seed": -5})[0] == 200

    # Bodies that are too large, cut off, or never end; words that are no HTTP.
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    s = socket.create_connection(("127.0.0.1", PORT), timeout=30)
    s.sendall(f"{head}Content-Length: 99999999999\r\n\r\n".encode())
    assert b" 413 " in s.recv(4096)
    s.close()
    raw_socket(f'{head}Content-Length: 100\r\n\r\n{{"prompt"'.encode(), wait=False)
    raw_socket(f"{head}Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n".encode())
    raw_socket(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, wait=False)
    raw_socket(b"GET " + b"/a" * 50000 + b" HTTP/1.1\r\n\r\n")
    # Clients that say nothing, or half a sentence, hold up nobody.
    idle = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(40)]
    for s in idle[::2]:
        s.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
    assert complete(prompt=[1, 2], max_tokens=2)["choices"]
    for s in idle:
        s.close()
    assert ask("GET", "/health")[0] == 200


def together():
    """Clients at once get what each would get alone."""
    prompts = [[i + 3, 50, i + 9, 8] for i in range(12)]
    alone = [complete(prompt=p, max_tokens=6)["choices"][0]["text"] for p in prompts]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            jobs = [pool.submit(complete, prompt=p, max_tokens=6) for p in prompts]
            words = pool.submit(ask, "POST", "/tokenize", {"prompt": "a b"})
            assert [j.result()["choices"][0]["text"] for j in jobs] == alone
            assert words.result()[0] == 200


def long_request(tokens):
    # Stop strings and end tokens may end it early: many prompts make it long anyway.
    body = json.dumps({"prompt": [[i % 400 + 3, 9] for i in range(tokens // 100)],
                       "max_tokens": 100, "temperature": 1.5, "seed": 3})
    return (f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            f"\r\n{body}").encode()


def leave():
    for _ in range(3):
        raw_socket(long_request(4000000), wait=False)
    time.sleep(0.2)
    start = time.time()
    assert complete(prompt=[1], max_tokens=1)["choices"]
    assert time.time() - start < 20, "requests of clients that left were carried out"


def finish(server):
    s = socket.create_connection(("127.0.0.1", PORT), timeout=100)
    s.sendall(long_request(5000))
    time.sleep(0.3)
    os.kill(int(server), signal.SIGINT)
    text = b""
    while part := s.recv(65536):
        text += part
    assert b" 200 " in text[:20], text[:200]
    x = json.loads(text.split(b"\r\n\r\n", 1)[1])
    assert len(x["choices"]) == 50


{f.__name__: f for f in (endpoints, scores, shared, generate, limit, key, hostile,
                         together, leave, finish)}[sys.argv[2]](*sys.argv[3:])
