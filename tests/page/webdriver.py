"""webdriver.py - a browser for tests: chromedriver over HTTP, with the standard library.

Nothing waits for time: `until` asks again until something holds, and gives up only after
minutes, so that a busy machine is slow and not wrong."""
import base64
import http.client
import json
import subprocess
import time

PATIENCE = 240  # seconds before a condition that does not come is a failure
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "Shift": "\ue008",
        "Control": "\ue009", "Alt": "\ue00a", "ArrowLeft": "\ue012", "ArrowUp": "\ue013",
        "ArrowRight": "\ue014", "ArrowDown": "\ue015", "Home": "\ue011", "End": "\ue010",
        "Space": " "}
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Failure(Exception):
    """What the driver said was wrong: kind is its name for it."""

    def __init__(self, kind, message):
        super().__init__(f"{kind}: {message.splitlines()[0] if message else ''}")
        self.kind = kind


class Browser:
    def __init__(self, folder):
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True)
        self.session = None
        self.port = None
        for line in self.driver.stdout:
            if "successfully on port" in line:
                self.port = int(line.rstrip().rstrip(".").split()[-1])
                break
        if not self.port:
            raise RuntimeError("chromedriver does not start")
        arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage",
                     "--disable-gpu", "--no-first-run", "--disable-background-networking",
                     "--disable-component-update", "--disable-sync", "--lang=en",
                     f"--user-data-dir={folder}", "--window-size=1280,900"]
        made = self.call("POST", "/session", {"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL"},
            "goog:chromeOptions": {"args": arguments}}}})
        self.session = made["sessionId"]

    def close(self):
        try:
            if self.session:
                self.call("DELETE", f"/session/{self.session}")
        finally:
            self.driver.terminate()
            self.driver.wait()

    # ---- Calls -----------------------------------------------------------------------

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request(method, path, json.dumps(body) if body is not None else None,
                           {"Content-Type": "application/json"})
        value = json.loads(connection.getresponse().read())["value"]
        connection.close()
        if isinstance(value, dict) and "error" in value:
            raise Failure(value["error"], value.get("message", ""))
        return value

    def do(self, method, path, body=None):
        return self.call(method, f"/session/{self.session}{path}", body)

    def run(self, script, *arguments):
        return self.do("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def devtools(self, command, **parameters):
        return self.do("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    # ---- What a person does -------------------------------------------------------------

    def open(self, address):
        self.do("POST", "/url", {"url": address})

    def reload(self):
        self.do("POST", "/refresh", {})

    def find(self, css):
        return self.do("POST", "/element", {"using": "css selector", "value": css})

    def all(self, css):
        return self.do("POST", "/elements", {"using": "css selector", "value": css})

    def click(self, css):
        """Clicks once the element can be clicked: it is there, and nothing covers it."""
        busy = ("no such element", "element not interactable", "element click intercepted",
                "stale element reference")

        def tried():
            try:
                element = self.find(css) if isinstance(css, str) else css
                self.do("POST", f"/element/{element[ELEMENT]}/click", {})
                return True
            except Failure as why:
                if why.kind not in busy:
                    raise
                return False
        self.until(tried, f"{css} can be clicked")

    def type(self, text):
        """Types into what has the focus."""
        focus = self.do("GET", "/element/active")
        self.do("POST", f"/element/{focus[ELEMENT]}/value", {"text": text})

    def press(self, *keys):
        """Presses keys together: press("Shift", "Enter")."""
        keys = [KEYS.get(k, k) for k in keys]
        actions = [{"type": "keyDown", "value": k} for k in keys]
        actions += [{"type": "keyUp", "value": k} for k in reversed(keys)]
        self.do("POST", "/actions", {"actions": [
            {"type": "key", "id": "keyboard", "actions": actions}]})

    def point(self, css):
        self.do("POST", "/actions", {"actions": [
            {"type": "pointer", "id": "mouse", "actions": [
                {"type": "pointerMove", "duration": 0, "origin": self.find(css),
                 "x": 0, "y": 0}]}]})

    # ---- What a person sees ------------------------------------------------------------

    def text(self, css):
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", css)

    def texts(self, css):
        return self.run("return [...document.querySelectorAll(arguments[0])]"
                        ".map((e) => e.innerText)", css)

    def count(self, css):
        return len(self.all(css))

    def seen(self, css):
        return self.run("const e = document.querySelector(arguments[0]);"
                        "return !!e && e.checkVisibility({visibilityProperty: true})", css)

    def until(self, holds, what):
        end = time.monotonic() + PATIENCE
        while True:
            value = holds()
            if value:
                return value
            if time.monotonic() > end:
                raise AssertionError(f"it never came: {what}")
            time.sleep(0.05)

    # ---- The screen ---------------------------------------------------------------------

    def size(self, width, height, scale=1):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height,
                      deviceScaleFactor=scale, mobile=width < 600)

    def scheme(self, name):
        self.devtools("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": name}])

    def picture(self, path):
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.do("GET", "/screenshot")))

    def complaints(self):
        """Errors of the page: scripts, and what its own policy forbade."""
        return [e["message"] for e in self.do("POST", "/se/log", {"type": "browser"})
                if e["level"] == "SEVERE"]
