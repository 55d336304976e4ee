"""Pages in a browser: opened without a network, and what is wrong with them. Skips by name where
there is none."""

import shutil
import subprocess
import tarfile
from contextlib import contextmanager

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
# what looks for barriers; npm fetches it for those who have npm and a registry, nothing keeps it
AXE = "axe-core@4"
NPM_S = 60

# Texts with less than 4.5:1 between their color and the background of the nearest element that has
# one.
CONTRASTS = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = color.map((c) =>
      (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim()) continue;
    if (["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    let behind = element;
    while (behind && channels(getComputedStyle(behind).backgroundColor)[3] === 0)
      behind = behind.parentElement;
    const shown = getComputedStyle(behind ?? document.body).backgroundColor;
    const background = light(channels(shown).slice(0, 3));
    const text = light(channels(getComputedStyle(element).color).slice(0, 3));
    const ratio = (Math.max(text, background) + 0.05) / (Math.min(text, background) + 0.05);
    if (ratio < 4.5) found.add(`${ratio.toFixed(2)} ${element.tagName}.${element.className}`);
  }
  return [...found];
}"""

# Texts of a figure that lie on one another, by more than two pixels; and tables that are wider than
# there is room.
OVERLAPS = r"""() => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  const found = [];
  for (const svg of document.querySelectorAll(".labkit-plot svg")) {
    const isSlanted = (text) => /rotate\(-(25|50)/.test(text.getAttribute("transform"));
    const upright = [...svg.querySelectorAll("text")].filter((text) => !isSlanted(text));
    const boxes = upright.map((text) => [text.getBoundingClientRect(), text.textContent]);
    boxes.forEach(([a, first], index) => boxes.slice(index + 1).forEach(([b, second]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 2 && down > 2 && first !== second) found.push(`${first} on ${second}`);
    }));
  }
  return found;
}"""
TOO_WIDE = """() => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  return [...document.querySelectorAll("table")].filter((table) =>
    table.offsetWidth > table.parentElement.clientWidth + 1)
    .map((table) => table.textContent.slice(0, 80));
}"""


@contextmanager
def opened_browser():
    """Give a function that opens a file or address, in light or dark, so many pixels wide: page,
    requests, errors."""
    if CHROMIUM is None:
        pytest.skip("no chromium to open pages with")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )

        def visit(place, scheme="light", width=1280):
            page = browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": 800}
            ).new_page()
            requests = []
            errors = []
            page.on("request", lambda request: requests.append(request.url))
            page.on(
                "console",
                lambda message: errors.append(message.text) if message.type == "error" else None,
            )
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(place if isinstance(place, str) else place.as_uri())
            return page, requests, errors

        yield visit
        browser.close()


def fetch_axe(folder):
    """The source of axe-core, fetched into `folder`. Skips where npm is missing or reaches no
    registry."""
    if shutil.which("npm") is None:
        pytest.skip("no npm to fetch axe-core with")
    command = ["npm", "pack", AXE, "--silent"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=NPM_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("npm reaches no registry to fetch axe-core from")
    with tarfile.open(next(folder.glob("axe-core-*.tgz"))) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


def barriers(page, axe):
    """What axe-core finds serious or critical on a page: the rule, and the elements."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        (rule["id"], [node["html"][:120] for node in rule["nodes"][:3]])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
