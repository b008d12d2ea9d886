#!/usr/bin/env python3
"""Pictures of the page with the default model: pictures.py STILL FOLDER"""
import gzip
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from test_page import Server, ask, finished  # noqa: E402
from webdriver import Browser  # noqa: E402

FACT = "One of the special magic numbers for harbor is: 7481926."
ASKED = ["What is a prime number?", "Three things to see in Lisbon"]


def paste(b, text):
    b.run("const e = document.getElementById('prompt'); e.value = arguments[0];"
          "e.dispatchEvent(new Event('input'))", text)
    b.click("#prompt")
    b.press("Enter")


def choose(b, *values):
    b.run("arguments[0].forEach((v, i) => {"
          "  const e = document.querySelectorAll('.pickers select')[i];"
          "  e.value = v; e.dispatchEvent(new Event('change')); })", values)


def show(b, css, block="start"):
    b.run("document.querySelector(arguments[0]).scrollIntoView({block: arguments[1]})",
          css, block)


def take(b, address, folder):
    b.size(1280, 1000)
    b.open(address + "/")
    b.until(lambda: b.text("#model"), "the model")
    b.click("#settings-open")
    b.click("#set-temperature")
    b.type("0")
    b.click("#set-max")
    b.type("100")
    b.press("Escape")
    for question in ASKED:
        b.click("#new")
        ask(b, question)
        finished(b, 1)
    b.click("#new")
    b.until(lambda: b.count(".message") == 0, "a new conversation")
    here = os.path.dirname(os.path.abspath(__file__))
    with gzip.open(os.path.join(here, "../../demo/held-out.txt.gz"), "rt",
                   encoding="utf-8") as f:
        text = f.read(7000)
    half = text.index(". ", 3000) + 2
    paste(b, "A special magic number is hidden within the following text.\n\n" +
          text[:half] + FACT + " " + text[half:] +
          "\n\nWhat is the special magic number for harbor mentioned in the text?")
    finished(b, 1)
    b.click(".toggle")
    b.until(lambda: b.count(".tokens .t") > 100, "tokens")
    to_fact(b)
    show(b, ".assistant")
    b.point("#title")
    b.picture(os.path.join(folder, "page.png"))
    b.scheme("dark")
    choose(b, "14", "2")
    to_fact(b)
    show(b, ".assistant")
    b.point("#title")
    b.picture(os.path.join(folder, "page-dark.png"))
    b.scheme("light")
    choose(b, "", "")
    to_fact(b)
    b.size(390, 844, 2)
    b.until(lambda: b.run("return document.getElementById('side').getBoundingClientRect()"
                          ".right <= 0"), "the drawer is shut")
    show(b, ".assistant")
    b.picture(os.path.join(folder, "page-phone.png"))


def to_fact(b):
    """Scrolls the tokens to the fact."""
    b.run("const e = document.querySelector('.tokens');"
          "const t = [...e.children].find((c) => c.textContent === ' harbor');"
          "e.scrollTop = t.offsetTop - e.offsetTop - 150")


def main():
    still, folder = sys.argv[1:]
    profile = tempfile.mkdtemp(prefix="still-page-")
    server = Server(still, "smollm2-still")
    browser = Browser(profile)
    try:
        take(browser, server.address, folder)
    finally:
        browser.close()
        server.stop()
        shutil.rmtree(profile, ignore_errors=True)


if __name__ == "__main__":
    main()
