#!/usr/bin/env python3
"""The page of `still serve` in a real browser: a person types, clicks and looks.

    test_page.py STILL MAKE_MODEL [NAME ...]

Starts a server on a small random model, whose text means nothing and whose answers seldom
end by themselves. The browser forgets everything between tests. Prints "skipped: ..." and
ends with 77 where there is no Chromium."""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from webdriver import Browser  # noqa: E402

PLAIN = ["--threads", "1", "--chat-template", "chatml"]
METHOD = ["--method", "still", "--chunk", "8", "--cap", "16", "--select", "4",
          "--no-allocate"]


class Server:
    def __init__(self, still, model, *options):
        self.process = subprocess.Popen(
            [still, "serve", model, "--port", "0", "--json", *options],
            stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line, f"the server does not start: {options}"
        self.address = f"http://127.0.0.1:{json.loads(line)['port']}"

    def freeze(self):
        """Nothing more comes until it thaws: a test can look at half an answer."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def stop(self):
        if self.process.poll() is None:
            self.thaw()
            self.process.send_signal(signal.SIGINT)
            self.process.wait()


# ---- What a person does ------------------------------------------------------------------

def begin(b, address, most=12, temperature="0"):
    """Opens the page and sets how long answers get, in the dialog."""
    b.open(address + "/")
    b.until(lambda: b.text("#model"), "the name of the model")
    b.click("#settings-open")
    b.until(lambda: b.seen("#settings"), "the settings")
    for name, value in (("#set-max", str(most)), ("#set-temperature", temperature)):
        b.click(name)
        b.press("Control", "a")
        b.type(value)
    b.press("Escape")
    b.until(lambda: not b.seen("#settings"), "the settings are closed")


def ask(b, text):
    b.click("#prompt")
    b.type(text)
    b.press("Enter")


def finished(b, answers):
    """Until there are so many answers and none is being written."""
    b.until(lambda: b.count(".assistant .foot") == answers and b.count(".caret") == 0,
            f"{answers} answers")


def answers(b):
    return b.texts(".assistant .body")


def questions(b):
    return b.texts(".user .body")


# ---- Tests --------------------------------------------------------------------------------

def test_chat(b, s):
    begin(b, s.address)
    assert b.seen("#empty") and b.count(".message") == 0
    ask(b, "Hello there")
    finished(b, 1)
    assert questions(b) == ["Hello there"], questions(b)
    assert answers(b)[0].strip(), "an answer without text"
    assert not b.seen("#empty")
    assert "12 tokens" in b.text(".figures"), b.text(".figures")
    assert "tokens/s" in b.text(".figures"), b.text(".figures")
    assert "memory now" in b.text(".bars") and "softmax" in b.text(".bars")
    assert b.text("#title") == "Hello there"
    assert b.texts("#chats .chat") == ["Hello there"]
    ask(b, "And again")
    finished(b, 2)
    assert questions(b) == ["Hello there", "And again"]
    assert b.run("return document.activeElement.id") == "prompt"


def half_an_answer(b, s, number):
    """Asks until an answer has begun and not ended when the server freezes. Returns how
    many answers there are then."""
    while True:
        ask(b, f"Go on, {number}")
        b.until(lambda: b.count(".assistant") == number and
                (len(answers(b)[-1]) > 20 or not b.count(".caret")), "some text")
        s.freeze()
        if b.count(".caret"):
            return number
        s.thaw()  # this one was quicker
        finished(b, number)
        number += 1


def test_stream_and_stop(b, s):
    begin(b, s.address, most=5000)
    try:
        n = half_an_answer(b, s, 1)
        before = answers(b)[-1]
        assert len(before) > 20, before
        assert b.run("return document.getElementById('send').ariaLabel") == "Stop"
        b.press("Escape")
        finished(b, n)
        s.thaw()
        assert "Stopped." in b.texts(".foot")[-1], b.texts(".foot")
        assert answers(b)[-1].startswith(before.rstrip())
        assert b.run("return document.getElementById('send').ariaLabel") == "Send"
        # The button stops, too, and what was written stays after a reload.
        n = half_an_answer(b, s, n + 1)
        b.click("#send")
        finished(b, n)
        s.thaw()
        all_of_them = answers(b)
        b.reload()
        b.until(lambda: b.count(".message") == 2 * n, "all messages")
        assert answers(b) == all_of_them
        # An answer that leaving the page interrupts is kept as far as it got.
        n = half_an_answer(b, s, n + 1)
        there = b.run("return location.href")
        b.open("about:blank")
        s.thaw()
        b.open(there)
        b.until(lambda: b.count(".message") == 2 * n, "all messages")
        assert len(answers(b)[-1]) > 20
        assert "interrupted" in b.texts(".foot")[-1], b.texts(".foot")
    finally:
        s.thaw()


def test_edit_and_retry(b, s):
    begin(b, s.address, temperature="1.5")
    ask(b, "First")
    finished(b, 1)
    ask(b, "Second")
    finished(b, 2)
    last = answers(b)[1]
    for _ in range(5):  # another sample may begin alike
        b.click(".message:last-child .actions button:nth-of-type(2)")
        b.until(lambda: b.count(".message") == 4, "the answer is asked for again")
        finished(b, 2)
        if answers(b)[1] != last:
            break
    assert answers(b)[1] != last
    # Editing the first message takes the rest of the conversation with it.
    b.click(".user:first-child .actions button:nth-of-type(2)")
    b.until(lambda: b.run("return document.activeElement.ariaLabel") == "Edit the message",
            "the edit box")
    b.press("Control", "a")
    b.type("Changed")
    b.press("Enter")
    b.until(lambda: questions(b) == ["Changed"], "the changed message")
    finished(b, 1)
    assert b.text("#title") == "Changed"
    # Escape leaves it as it was.
    b.press("ArrowUp")
    b.until(lambda: b.count(".edit-box") == 1, "the edit box")
    b.type("nothing of this")
    b.press("Escape")
    b.until(lambda: b.count(".edit-box") == 0, "no edit box")
    assert questions(b) == ["Changed"]


def test_conversations(b, s):
    begin(b, s.address)
    ask(b, "One")
    finished(b, 1)
    first = answers(b)
    b.click("#new")
    b.until(lambda: b.count(".message") == 0, "an empty conversation")
    ask(b, "Two")
    finished(b, 1)
    assert b.texts("#chats .chat") == ["Two", "One"]
    b.click("#chats li:nth-child(2) .chat")
    b.until(lambda: questions(b) == ["One"], "the first conversation")
    assert answers(b) == first
    b.reload()
    b.until(lambda: questions(b) == ["One"], "the first conversation after a reload")
    assert answers(b) == first
    assert b.texts("#chats .chat") == ["Two", "One"]
    # What the model kept is there after a reload, too.
    b.click(".toggle")
    b.until(lambda: b.count(".tokens .t") > 10, "tokens")
    # A conversation goes on while another one is looked at.
    b.click("#new")
    b.until(lambda: b.count(".message") == 0, "an empty conversation")
    ask(b, "Three")
    b.click("#chats li:last-child .chat")
    b.until(lambda: questions(b) != ["Three"], "another conversation")
    b.until(lambda: b.count("#chats .running") == 0, "the answer that nobody looks at")
    b.click("#chats li:first-child .chat")
    b.until(lambda: questions(b) == ["Three"], "the third conversation")
    finished(b, 1)
    # Deleting asks first.
    b.point("#chats li:first-child")
    b.click("#chats li:first-child .remove")
    assert b.text("#chats li:first-child .remove") == "Delete?"
    assert b.count("#chats li") == 3
    b.click("#chats li:first-child .remove")
    b.until(lambda: b.count("#chats li") == 2, "two conversations")
    b.reload()
    b.until(lambda: b.count("#chats li") == 2, "two conversations after a reload")


def test_kept(b, s):
    begin(b, s.address, most=20)
    ask(b, "The lake is still in winter and every sound carries far across the ice. " * 3)
    finished(b, 1)
    b.click(".toggle")
    b.until(lambda: b.count(".tokens .t") > 60, "tokens")
    for place in ("window", "salient", "folded"):
        assert b.count(f".tokens .{place}") > 0, f"no token is {place}"
        assert place in b.text(".legend"), b.text(".legend")
    text = b.run("return document.querySelector('.tokens').textContent")
    assert "lake is still in winter" in text, text[:200]
    # One head: no more salient tokens than its cap, a window of one to two chunks.
    b.run("const [l, h] = document.querySelectorAll('.pickers select');"
          "l.value = '1'; l.dispatchEvent(new Event('change'));"
          "h.value = '0'; h.dispatchEvent(new Event('change'));")
    b.until(lambda: b.count(".cell.chosen") == 1, "one head")
    assert b.count(".tokens .salient") == 16, b.count(".tokens .salient")
    assert 8 < b.count(".tokens .window") <= 16, b.count(".tokens .window")
    levels = [n for n in range(8) if b.count(f".tokens .salient.l{n}")]
    assert len(levels) > 2, f"scores of salient tokens are all of the levels {levels}"
    b.click(".cell:first-child")
    b.until(lambda: b.run("return document.querySelector('.pickers select').value") == "0",
            "the head that was clicked")
    # Pointing at a token tells where it is; so do the keys.
    b.point(".tokens .salient")
    b.until(lambda: "salient" in b.text(".told"), "what is told of a salient token")
    b.click(".tokens .folded")
    b.until(lambda: "folded" in b.text(".told"), "what is told of a folded token")
    b.run("document.querySelector('.tokens').focus()")
    b.press("Home")
    b.until(lambda: b.text(".told").startswith("Token 1,"), "the first token")
    b.press("ArrowRight")
    b.until(lambda: b.text(".told").startswith("Token 2,"), "the second token")
    b.press("End")
    b.until(lambda: "window" in b.text(".told"), "the last token")
    assert b.count(".chart .softmax") == 1
    b.click(".toggle")
    b.until(lambda: not b.seen(".kept"), "it is closed")


def test_keyboard_alone(b, s):
    begin(b, s.address)
    b.press("Tab")
    b.press("/")
    b.until(lambda: b.run("return document.activeElement.id") == "prompt", "the box")
    b.type("line one")
    b.press("Shift", "Enter")
    b.type("line two")
    b.press("Enter")
    finished(b, 1)
    assert questions(b) == ["line one\nline two"], questions(b)
    b.press("Alt", "k")
    b.until(lambda: b.count(".tokens .t") > 10, "what was kept")
    b.press("Alt", "n")
    b.until(lambda: b.count(".message") == 0, "a new conversation")
    b.type("second")
    b.press("Enter")
    finished(b, 1)
    b.press("Alt", "ArrowDown")
    b.until(lambda: questions(b)[:1] == ["line one\nline two"], "the one below")
    b.press("Alt", "ArrowUp")
    b.until(lambda: questions(b) == ["second"], "the one above")
    b.press("Alt", "r")
    finished(b, 1)
    b.press("Alt", "s")
    b.until(lambda: b.seen("#settings"), "the settings")
    b.press("Escape")
    b.until(lambda: not b.seen("#settings"), "no settings")
    # A temperature between two steps of the field is one; beyond its ends the nearest counts.
    for typed, kept in (("0.333", 0.333), ("7", 2)):
        b.press("Alt", "s")
        b.until(lambda: b.seen("#settings"), "the settings")
        b.click("#set-temperature")
        b.press("Control", "a")
        b.type(typed)
        b.click("#settings-form .icon-button")
        b.until(lambda: not b.seen("#settings"), "the settings are closed")
        # The dialog hides before its event `close`, which keeps the settings, is sent.
        stored = "return JSON.parse(localStorage['still.settings']).temperature"
        b.until(lambda: b.run(stored) == kept, f"a temperature of {kept}")
    # Everything that can be clicked can be reached with Tab, and shows that it is.
    reached = set()
    for _ in range(60):
        b.press("Tab")
        reached.add(b.run(
            "const e = document.activeElement;"
            "return e.id || e.textContent.trim().slice(0, 20) || e.ariaLabel"))
    for name in ("new", "settings-open", "prompt", "send", "Copy", "Edit", "Answer again"):
        assert name in reached, f"{name} cannot be reached: {reached}"


def test_text_is_text(b, s):
    begin(b, s.address)
    hostile = "<img src=x onerror=alert(1)> **bold** `<b>code</b>` <script>alert(2)</script>"
    ask(b, hostile)
    finished(b, 1)
    assert questions(b) == [hostile]
    assert b.count("#messages img, #messages script, #messages b") == 0
    assert b.texts("#chats .chat")[0].startswith("<img src=x")
    # The same through the Markdown that answers go through.
    made = b.do("POST", "/execute/async", {"script": """
        const [text, done] = arguments;
        import('/markdown.js').then(({ markdown }) => {
          const box = document.createElement('div');
          box.append(markdown(text, null));
          done([box.textContent, box.querySelectorAll('img, script, b, a').length,
            [...box.querySelectorAll('*')].map((e) => e.tagName).join(' ')]);
        });""", "args": [
            hostile + "\n\n```html\n<script>x</script>\n```\n\n1. one\n   - *in*\n2. two\n"
            "\n# head\n> quote\n[a](javascript:alert(1))"]})
    assert "<img src=x onerror=alert(1)>" in made[0] and made[1] == 0, made
    assert made[2] == ("P STRONG CODE FIGURE DIV SPAN PRE CODE OL LI UL LI EM LI P "
                       "BLOCKQUOTE P"), made[2]


def contrast(a, b):
    def luminance(rgb):
        parts = [c / 255 for c in rgb]
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    x, y = sorted((luminance(a), luminance(b)))
    return (y + 0.05) / (x + 0.05)


COLOURS = """
  // The colour of an element and of what is behind it, both as [r, g, b].
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  return [...document.querySelectorAll(arguments[0])].map((e) => {
    let behind = [255, 255, 255];
    for (let at = e; at; at = at.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(at).backgroundColor);
      if (a > 0) { behind = [r, g, b]; break; }
    }
    return [e.className || e.id || e.tagName, numbers(getComputedStyle(e).color).slice(0, 3),
      behind];
  });"""


def test_light_and_dark(b, s):
    begin(b, s.address, most=20)
    ask(b, "The lake is still in winter and every sound carries far across the ice. " * 3)
    finished(b, 1)
    b.click(".toggle")
    b.until(lambda: b.count(".tokens .t") > 60, "tokens")
    papers = []
    for scheme in ("light", "dark"):
        b.scheme(scheme)
        b.until(lambda: b.run("return matchMedia('(prefers-color-scheme: dark)').matches")
                == (scheme == "dark"), scheme)
        papers.append(b.run("return getComputedStyle(document.body).backgroundColor"))
        for rank in ("share", "rank"):
            b.run("const e = document.querySelectorAll('.pickers select')[2];"
                  "e.value = arguments[0]; e.dispatchEvent(new Event('change'))", rank)
            for name, ink, paper in b.run(COLOURS, ".body, .figures, .bar-name, .chat, h1, "
                                          ".model, .action, .told, figcaption, .legend, "
                                          ".note, .hint, .tokens .salient, .tokens .window"):
                ratio = contrast(ink, paper)
                assert ratio >= 4.5, f"{scheme}: {name} has a contrast of {ratio:.2f}"
    assert papers[0] != papers[1], papers


def test_phone(b, s):
    b.size(360, 740, 2)
    begin(b, s.address)
    wide = "return document.documentElement.scrollWidth <= innerWidth && innerWidth === 360"
    assert b.run(wide), "the empty page is wider than the screen"
    assert not b.seen("#new")
    ask(b, "A word that is long: " + "x" * 120)
    finished(b, 1)
    b.click(".toggle")
    b.until(lambda: b.count(".tokens .t") > 10, "tokens")
    assert b.run(wide), "the conversation is wider than the screen"
    b.click("#side-open")
    b.until(lambda: b.seen("#new"), "the conversations")
    b.press("Escape")
    b.until(lambda: not b.seen("#new"), "no conversations")
    b.click("#side-open")
    b.click("#new")
    b.until(lambda: b.count(".message") == 0 and not b.seen("#new"), "a new conversation")
    b.click("#settings-open")
    b.until(lambda: b.seen("#settings"), "the settings")
    assert b.run(wide), "the settings are wider than the screen"


def test_long(b, s):
    """Messages scroll; the page around them stays, and the end stays in sight."""
    begin(b, s.address)
    for number in (1, 2, 3):
        b.run("const p = document.getElementById('prompt'); p.value = 'a word\\n'.repeat(200);"
              "p.dispatchEvent(new Event('input'))")
        b.click("#send")
        finished(b, number)
    assert b.run("return document.documentElement.scrollHeight <= innerHeight")
    assert b.run("const s = document.getElementById('scroll');"
                 "return s.scrollHeight > innerHeight &&"
                 "  s.scrollHeight - s.scrollTop - s.clientHeight < 80")
    b.click("#prompt")


def test_names(b, s):
    """Every control has a name for those who do not see it."""
    begin(b, s.address)
    ask(b, "Hello")
    finished(b, 1)
    b.click(".toggle")
    b.until(lambda: b.count(".tokens .t") > 10, "tokens")
    controls = 0
    for _ in range(2):
        for node in b.devtools("Accessibility.getFullAXTree")["nodes"]:
            role = node.get("role", {}).get("value")
            if node.get("ignored") or role not in (
                    "button", "textbox", "combobox", "checkbox", "spinbutton", "link"):
                continue
            assert node.get("name", {}).get("value", "").strip(), f"no name: {node}"
            controls += 1
        b.press("Alt", "s")
        b.until(lambda: b.seen("#settings"), "the settings")
    assert controls > 20, controls


def test_key_and_errors(b, s):
    """A server that wants a key, and one that is gone."""
    with tempfile.NamedTemporaryFile("w", suffix=".key") as key:
        key.write("sesame-1234\n")
        key.flush()
        own = Server(s.still, s.model, *PLAIN, "--api-key-file", key.name)
        try:
            b.open(own.address + "/")
            b.until(lambda: b.text("#model") == "needs an API key", "the key is missed")
            ask(b, "Hello")
            b.until(lambda: b.seen("#settings"), "the settings")
            b.until(lambda: b.run("return document.activeElement.id") == "set-key", "the key")
            b.type("sesame-1234")
            b.click("#set-max")
            b.type("5")
            b.press("Escape")
            b.until(lambda: b.text("#model") not in ("", "needs an API key"), "the model")
            b.press("Alt", "r")
            b.until(lambda: "5 tokens" in b.text(".figures"), "an answer")
            # This one runs softmax attention, which keeps everything and grows.
            b.click(".toggle")
            b.until(lambda: b.count(".tokens .t") > 10, "tokens")
            assert b.count(".tokens .salient, .tokens .folded, .tokens .gone") == 0
            assert b.count(".tokens .window") > 10 and b.count(".chart .own") == 0
        finally:
            own.stop()
        ask(b, "Are you there?")
        b.until(lambda: "cannot be reached" in b.text(".error"), "an error")
        b.complaints()  # those of refused requests are meant


TESTS = [test_chat, test_stream_and_stop, test_edit_and_retry, test_conversations, test_kept,
         test_keyboard_alone, test_text_is_text, test_light_and_dark, test_phone, test_long,
         test_names, test_key_and_errors]


def forget(b, server):
    """As a browser that was never here, with a wide, light screen."""
    b.open("about:blank")
    b.devtools("Storage.clearDataForOrigin", origin=server.address, storageTypes="all")
    b.size(1280, 900)
    b.scheme("light")
    b.complaints()


def run(test, browser, server):
    try:
        forget(browser, server)
        test(browser, server)
        said = browser.complaints()
        assert not said, f"the page complains: {said}"
        print(f"ok {test.__name__}", flush=True)
        return True
    except Exception:  # a driver that fails is a failed test like any other
        traceback.print_exc()
        if os.environ.get("PICTURES"):
            browser.picture(os.path.join(os.environ["PICTURES"], f"{test.__name__}.png"))
        print(f"FAILED {test.__name__}", flush=True)
        return False


def main():
    still, make_model, *names = sys.argv[1:]
    if not shutil.which("chromedriver") or not shutil.which("chromium"):
        print("skipped: there is no chromium with its chromedriver here")
        return 77
    with tempfile.TemporaryDirectory(prefix="still-page-", ignore_cleanup_errors=True) as folder:
        model = os.path.join(folder, "tiny.gguf")
        subprocess.run([make_model, "tiny", model, "--layers", "24", "--vocab", "32000"],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = Server(still, model, "--ctx", "65536", *PLAIN, *METHOD)
        server.still, server.model = still, model
        browser = Browser(os.path.join(folder, "profile"))
        try:
            wanted = [t for t in TESTS if not names or t.__name__ in names]
            failed = [t for t in wanted if not run(t, browser, server)]
        finally:
            browser.close()
            server.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
