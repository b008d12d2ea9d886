"""Many clients of one server, for serve-load: streams that cost the machine little.

serve-load's other loads give each client a thread, which a thousand of them cannot have. Here
an event loop reads the bytes of all clients of a process and looks only for what it needs, so
that the server is what is measured; `drive` shares the clients out over processes and says how
busy these were. Only Python's standard library."""
import asyncio
import json
import multiprocessing
import random
import resource
import time
import urllib.parse

HEADERS_MOST = 1 << 16


class Stream(asyncio.Protocol):
    """One request: when it was sent, when its tokens came, how it ended."""

    def __init__(self, request, ended):
        self.request, self.ended = request, ended
        self.buffer, self.text = bytearray(), bytearray()
        self.status = self.made = 0
        self.done = False
        self.error = None
        self.sent, self.events = 0.0, []

    def connection_made(self, transport):
        self.transport = transport
        self.sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data):
        now = time.perf_counter()
        self.buffer += data
        if not self.status and not self.take_head():
            return
        while self.take_chunk():
            pass
        while (end := self.text.find(b"\n\n")) >= 0:
            self.take_event(bytes(self.text[:end]), now)
            del self.text[:end + 2]

    def take_head(self):
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self.buffer) > HEADERS_MOST:
                self.fail("headers without an end")
            return False
        self.status = int(self.buffer.split(b" ", 2)[1])
        if self.status != 200:
            self.fail(f"status {self.status}: {bytes(self.buffer[end + 4:end + 304])!r}")
            return False
        del self.buffer[:end + 4]
        return True

    def take_chunk(self):
        """One chunk of the body, if it is there as a whole."""
        end = self.buffer.find(b"\r\n")
        if end < 0:
            return False
        size = int(self.buffer[:end], 16)
        if len(self.buffer) < end + 4 + size:
            return False
        self.text += self.buffer[end + 2:end + 2 + size]
        del self.buffer[:end + 4 + size]
        if size == 0:
            self.transport.close()
        return size > 0

    def take_event(self, event, now):
        if not event.startswith(b"data: "):
            return  # a ping
        if event.startswith(b"data: [DONE]"):
            self.done = True
        elif event.startswith(b'data: {"error"'):
            self.fail(event[6:306].decode(errors="replace"))
        elif b'"usage":{' in event:
            self.made = json.loads(event[6:])["usage"]["completion_tokens"]
        elif b'"text":"' in event and b'"text":""' not in event:
            self.events.append(now)

    def fail(self, why):
        self.error = self.error or why
        self.transport.close()

    def connection_lost(self, exc):
        if exc:
            self.error = self.error or str(exc)
        if not self.ended.done():
            self.ended.set_result(None)


def request_of(at, body):
    data = json.dumps(body).encode()
    return (f"POST /v1/completions HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


async def one_answer(at, ids, tokens, until):
    loop = asyncio.get_running_loop()
    stream = Stream(request_of(at, {
        "prompt": ids, "max_tokens": tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True}}), loop.create_future())
    began = time.perf_counter()
    await loop.create_connection(lambda: stream, at.hostname, at.port)
    try:
        await asyncio.wait_for(stream.ended, max(1.0, until - time.perf_counter()))
    except asyncio.TimeoutError:
        stream.transport.abort()
        raise RuntimeError(f"not all of an answer after {time.perf_counter() - began:.0f} s: "
                           f"{len(stream.events)} events") from None
    stream.sent = began
    if stream.error or not stream.done or stream.made != tokens or not stream.events:
        raise RuntimeError(stream.error or f"{stream.made} tokens came, {tokens} were asked "
                           f"for; the stream {'ended' if stream.done else 'broke off'}")
    return stream


async def client(at, number, o, answers, failures):
    """Asks again as soon as it has its answer. It begins within the ramp, and it does not
    break off: an answer that was begun in time is waited for, for o["patience"] seconds after
    the end."""
    r = random.Random(1000003 * number)
    await asyncio.sleep(max(0, o["start"] + o["ramp"] * number / o["clients"]
                            - time.perf_counter()))
    while time.perf_counter() < o["end"]:
        ids = r.choices(range(*o["ids"]), k=o["context"])
        try:
            answers.append(await one_answer(at, ids, o["tokens"],
                                            o["end"] + o["patience"]))
        except (OSError, RuntimeError, ValueError) as e:
            failures.append(str(e))
            await asyncio.sleep(0.1)


async def clients(o, numbers):
    answers, failures = [], []
    at = urllib.parse.urlsplit(o["url"])
    await asyncio.gather(*(client(at, i, o, answers, failures) for i in numbers))
    return [(a.sent, a.events, a.made) for a in answers], failures


def process(o, part, pipe):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = o["clients"] + 64
    if soft < want:
        resource.setrlimit(resource.RLIMIT_NOFILE,
                           (min(want, hard) if hard != resource.RLIM_INFINITY else want, hard))
    result = asyncio.run(clients(o, range(part, o["clients"], o["processes"])))
    pipe.send((*result, time.process_time()))
    pipe.close()


def drive(o, every_second=None):
    """o: url, clients, processes, context, tokens, ids (first, end), seconds, ramp, patience. Returns
    the answers as (sent, [event], made), what failed, and the processor time of the busiest
    process as a share of the time. every_second is called while they run."""
    start = time.perf_counter()  # one clock for all processes of a machine
    o = dict(o, start=start, end=start + o["seconds"])
    context = multiprocessing.get_context("fork")
    jobs = []
    for part in range(o["processes"]):
        mine, theirs = context.Pipe(duplex=False)
        p = context.Process(target=process, args=(o, part, theirs))
        p.start()
        theirs.close()
        jobs.append((p, mine))
    answers, failures, busiest = [], [], 0.0
    next_look = start
    for p, pipe in jobs:
        while not pipe.poll(max(0.0, next_look - time.perf_counter())):
            if time.perf_counter() >= next_look:
                next_look += 1
                if every_second:
                    every_second()
        try:
            part, failed, used = pipe.recv()
        except EOFError:
            part, failed, used = [], [f"a process of clients ended, status {p.exitcode}"], 0.0
        p.join()
        answers += part
        failures += failed
        busiest = max(busiest, used / (time.perf_counter() - start))
    return answers, failures, busiest
