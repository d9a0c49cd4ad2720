"""A page in a real browser without a window: what it measures there."""

from __future__ import annotations

import json
import re
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

BROWSER = "chromium"

# A table may be wider than the window only inside of what scrolls; anything else that reaches over its edge is cut.
_MEASURE = """
<script>
(() => {
  const extra = (() => { %s })() || {};
  const edge = document.documentElement.clientWidth, cut = [];
  for (const element of document.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    let scrolls = false;
    for (let over = element; over; over = over.parentElement)
      scrolls ||= ["auto", "scroll"].includes(getComputedStyle(over).overflowX);
    if (box.width && box.right > edge + 1 && !scrolls) cut.push(element.tagName + "." + element.className);
  }
  const overflow = document.documentElement.scrollWidth - edge;
  const found = {width: window.innerWidth, overflow, cut: cut.slice(0, 5), ...extra};
  const note = document.createElement("pre");
  note.id = "measured";
  note.textContent = JSON.stringify(found);
  document.body.append(note);
})();
</script>
"""
# A window has a least width, which is wider than a phone; a frame has none.
_FRAME = """<!DOCTYPE html>
<iframe id="frame" style="border: 0; width: %dpx; height: 900px" srcdoc="%s"></iframe>
<script>
onload = () => {
  const inside = document.getElementById("frame").contentDocument;
  document.body.append(inside.getElementById("measured"));
};
</script>
"""


def measured(page: str, width: int, script: str, folder: Path) -> dict[str, Any]:
    """Return what a browser finds on a page in a window so wide.

    `width`, `overflow` (pixels by which the page is wider than its window), `cut` (elements that reach over the edge
    and can't be scrolled to), and the fields of the object that `script`, the body of a function, returns.
    """
    # The page itself forbids nothing that this needs: scripts in it run, as its own do.
    allowed = page.replace("style-src 'unsafe-inline'\"", "style-src 'unsafe-inline'; script-src 'unsafe-inline'\"")
    file = folder / "page.html"
    whole = allowed.replace("</body>", _MEASURE.replace("%s", script) + "</body>")
    file.write_text(_FRAME % (width, escape(whole)), encoding="utf-8")
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", file.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.S)
    assert found is not None, "the page's script did not run to its end"
    result: dict[str, Any] = json.loads(unescape(found[1]))
    return result
