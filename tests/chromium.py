"""Headless Chromium over its DevTools protocol, by a pipe: nothing but Chromium itself has to be installed."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--mute-audio")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")
KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "End": 35,
    "Home": 36,
    **{f"Arrow{n}": 37 + i for i, n in enumerate(("Left", "Up", "Right", "Down"))},
}


class Chromium:
    """One browser; each `page` has storage of its own."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, ours = zip(os.pipe(), reversed(os.pipe()), strict=True)  # what Chromium reads and writes
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in theirs]
        command = [
            CHROMIUM,
            *FLAGS,
            *QUIET,
            "--remote-debugging-pipe",
            f"--user-data-dir={self.folder.name}",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            start_new_session=True,
            preexec_fn=lambda: [os.dup2(end, number) for end, number in zip(high, (3, 4), strict=True)],
        )
        for end in (*theirs, *high):
            os.close(end)
        self.writer, self.reader = ours
        self.number, self.rest, self.pages = 0, b"", {}
        return self

    def __exit__(self, *_):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.writer)
        os.close(self.reader)
        self.folder.cleanup()

    def call(self, method, session=None, **params):
        """The result of a command of the protocol. Meanwhile the events of pages are noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while True:
            while b"\0" in self.rest:
                data, _, self.rest = self.rest.partition(b"\0")
                answer = json.loads(data)
                if answer.get("id") == self.number:
                    assert "error" not in answer, (method, answer["error"])
                    return answer["result"]
                page = self.pages.get(answer.get("sessionId"))
                if page is not None and "method" in answer:  # else the late answer to a command that was given up
                    page.note(answer["method"], answer["params"])
            assert select.select([self.reader], [], [], max(0.0, end - time.monotonic()))[0], f"{method}: no answer"
            data = os.read(self.reader, 1 << 20)
            assert data, "Chromium ended"
            self.rest += data

    def page(self, url, width=1200, height=900, dark=False, first=""):
        """first: a script that runs before those of the page"""
        return Page(self, url, width, height, dark, first)


class Page:
    """A tab. `problems`: errors in its console, exceptions, and violations of its Content-Security-Policy."""

    def __init__(self, browser, url, width, height, dark, first, context=None):
        self.browser, self.problems, self.requested, self.loads = browser, [], [], 0
        self.context = context or browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        browser.pages[self.session] = self
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as the only window of a desk
        self.look(width, height, dark)
        self.call("Page.addScriptToEvaluateOnNewDocument", source=first)
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def second_tab(self, url):
        """A tab beside this one, with the same local storage."""
        return Page(self.browser, url, 1200, 900, False, "", self.context)

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def look(self, width, height=900, dark=False):
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def note(self, method, params):
        if method == "Runtime.exceptionThrown":
            self.problems.append(
                params["exceptionDetails"].get("exception", params["exceptionDetails"]).get("description")
            )
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loads += 1

    def reload(self):
        """Load the page anew. `until` alone could still ask the old document."""
        loads, end = self.loads, time.monotonic() + 60
        self.call("Page.reload")
        while self.loads == loads:
            assert time.monotonic() < end, "the page was not loaded anew"
            self.browser.call("Browser.getVersion")  # takes in the events
            time.sleep(0.02)

    def run(self, script):
        """The value of an expression, awaited."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script, timeout_s=20.0):
        end = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            assert time.monotonic() < end, (
                f"{script}: not within {timeout_s} s; the page says: {self.run('document.body.innerText')}"
            )
            time.sleep(0.02)
        return value

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector, index=0):
        """A real click on the middle of an element; it fails if something else is there."""
        script = """(() => {
            const element = document.querySelectorAll(%s)[%d];
            element.scrollIntoView({block: "center"});
            const box = element.getClientRects()[0], x = box.left + box.width / 2, y = box.top + box.height / 2;
            const top = document.elementFromPoint(x, y);
            return element === top || element.contains(top) ? [x, y] : null;
        })()"""
        place = self.run(script % (json.dumps(selector), index))
        assert place, f"{selector} is hidden"
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, shift=False):
        for kind in ("rawKeyDown", "char", "keyUp"):
            if kind != "char" or key == "Enter":
                text = {"text": "\r"} if key == "Enter" else {}
                text |= {"modifiers": 8} if shift else {}
                self.call(
                    "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **text
                )

    def tab_to(self, selector, back=False):
        """Press Tab until this element has the focus; it fails if it cannot be reached so."""
        for _ in range(60):
            if self.run(f"document.activeElement.matches({json.dumps(selector)})"):
                return
            self.press("Tab", shift=back)
        raise AssertionError(f"{selector} cannot be reached with Tab")

    def keep_downloads(self, folder):
        """What the page offers for download is written to this folder."""
        options = {"behavior": "allow", "downloadPath": str(folder), "browserContextId": self.context}
        self.browser.call("Browser.setDownloadBehavior", **options)

    def pasted(self):
        """The text that was copied, read by pasting it into a field of its own."""
        self.run("document.body.append(Object.assign(document.createElement('textarea'), {id: 'pasted'}))")
        self.run("$('pasted').focus()")
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", key="v", commands=["paste"])
        return self.run("(() => { const text = $('pasted').value; $('pasted').remove(); return text; })()")

    def screenshot(self, path, whole=False):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


# Text with too little contrast to its background: the WCAG asks for 4.5, and for 3 where it is large.
CONTRAST = """(() => {
    const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
    const pen = canvas.getContext("2d", {willReadFrequently: true});
    const fill = (colour) => {
        pen.fillStyle = colour;
        pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const linear = (v) => v <= 10 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
    const light = (rgb) => rgb.reduce((sum, v, i) => sum + linear(v) * [.2126, .7152, .0722][i], 0);
    const poor = [];
    for (const element of document.querySelectorAll("body *")) {
        const words = [...element.childNodes].filter((node) => node.nodeType === 3 && node.data.trim());
        if (!words.length || !element.checkVisibility() || element.closest("select, .sr, script, canvas")) continue;
        const line = [];
        for (let at = element; at; at = at.parentElement) line.unshift(at);
        let back;
        for (const at of line) back = fill(getComputedStyle(at).backgroundColor);
        const style = getComputedStyle(element);
        const [a, b] = [light(back), light(fill(style.color))].sort((x, y) => y - x);
        const ratio = (a + .05) / (b + .05);
        if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) poor.push([element.textContent.slice(0, 30), ratio]);
    }
    return poor;
})()"""
WIDE = """[...document.querySelectorAll("*")]
    .filter((each) => each.checkVisibility() && !each.parentElement?.closest("pre")) // a block of code scrolls
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
    .map((each) => each.outerHTML.slice(0, 80))"""
NAMED = ("button", "textbox", "spinbutton", "checkbox", "combobox", "tab", "image", "dialog", "tabpanel")


def check_readable(page, note=""):
    """Nothing is wider than the screen, all text has contrast, and all controls have names."""
    assert page.run(WIDE) == [], note
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run(CONTRAST) == [], note
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in NAMED]
    assert len(controls) > 5
    assert [node for node in controls if not node.get("name", {}).get("value")] == [], note


def fill_in(page, **values):
    """Write these values into the page's settings, named by their fields."""
    for name, value in values.items():
        page.run(f"$({json.dumps(name)}).value = {json.dumps(str(value))}")


def choose_model(page, name):
    page.run(f"$('model').value = {json.dumps(name)}; $('model').onchange()")
    page.until(f"model.id === {json.dumps(name)}")
